"""``AppliedErasures``: what other servers erased through a bucket and this one has too, across
restarts.

Every start reads all tombstones that are left. Without this note it would erase what was stored
since."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import xxhash

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import all_true, is_true
from sglang_tiered.storage.region.files import APPLIED_FORGETS_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.region.notes import Notes

__all__ = ["AppliedErasures"]

VERSION = 1
MAX_ENTRIES = 65_536
"""Beyond it a start applies the oldest again, which is safe and costs pages."""

_WAIT_S = 10.0

logger = logging.getLogger(__name__)


class _File(msgspec.Struct, frozen=True, array_like=True):
    version: int
    digests: list[int]


class AppliedErasures:
    """``erase`` erases on this server; it may be asked again for what is not known to be durable.
    ``told`` is called on one thread, and waits for the disk."""

    def __init__(self, notes: Notes, erase: Callable[[Erasure], Future[bool]]) -> None:
        self._notes = notes
        self._erase = erase
        self._log = OnceLog(logger)
        file = unseal(self._notes.read(APPLIED_FORGETS_NAME), _File)
        known = file.digests if file is not None and file.version == VERSION else []
        self._digests = dict.fromkeys(known)

    def told(self, whats: Sequence[Erasure]) -> None:
        """Erase what was not erased here yet: pages of several together, each tenant once."""
        news = {
            digest: each
            for each in whats
            if (digest := xxhash.xxh3_64_intdigest(each.id)) not in self._digests
        }
        due = {digest: each for digest, each in news.items() if not each.is_empty}
        keys = dict.fromkeys(key for each in due.values() for key in each.keys or ())
        tenants = dict.fromkeys(each.tenant for each in due.values() if each.keys is None)
        begun = [self._erase(Erasure(None, tenant, spread=False)) for tenant in tenants]
        if keys:
            begun.append(self._erase(Erasure.of(keys, spread=False)))
        if not is_true(all_true(begun), _WAIT_S):
            # Hidden all the same; the next start erases them again.
            news = {digest: each for digest, each in news.items() if digest not in due}
        if not news:
            return
        self._digests.update(dict.fromkeys(news))
        while len(self._digests) > MAX_ENTRIES:
            del self._digests[next(iter(self._digests))]
        self._write()

    def _write(self) -> None:
        try:
            self._notes.write(APPLIED_FORGETS_NAME, seal(_File(VERSION, list(self._digests))))
        except OSError as error:
            self._log.report(
                "erasures",
                "the note of what was erased cannot be written (%s); until it can, a restart "
                "erases what was stored since again",
                error,
            )
        else:
            self._log.settle("erasures")
