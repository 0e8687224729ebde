"""``AppliedForgets``: the tombstones of a bucket whose pages this server has forgotten, across
restarts.

Every start reads all tombstones that are left. Without this note it would forget pages that were
stored since."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec
import xxhash

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.files import APPLIED_FORGETS_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Tombstone
    from sglang_tiered.storage.region.engine import RegionEngine

__all__ = ["AppliedForgets"]

VERSION = 1
MAX_ENTRIES = 65_536
"""Beyond it a start applies the oldest again, which is safe and costs pages."""

_WAIT_S = 10.0
_SKEW_MS = 120_000

logger = logging.getLogger(__name__)


class _File(msgspec.Struct, frozen=True, array_like=True):
    version: int
    digests: list[int]


class AppliedForgets:
    """``forget`` forgets pages on this server; it may be asked again for what is not known to be
    durable. ``told`` is called on one thread, and waits for the disk."""

    def __init__(
        self,
        nvme: RegionEngine,
        forget: Callable[[Sequence[bytes]], Future[bool]],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._notes = nvme.notes
        self._forget = forget
        self._log = OnceLog(logger)
        file = unseal(self._notes.read(APPLIED_FORGETS_NAME), _File)
        known = file.digests if file is not None and file.version == VERSION else []
        self._digests = dict.fromkeys(known)
        # What was forgotten before there was anything here needs no note in the store.
        is_empty = nvme.stats().physical_bytes == 0
        self._empty_until_ms = int(wall_clock() * 1000) - _SKEW_MS if is_empty else 0

    def told(self, tombstones: Sequence[Tombstone]) -> None:
        """Forget the pages of tombstones, but for those of which that was done."""
        news = {
            digest: each
            for each in tombstones
            if (digest := xxhash.xxh3_64_intdigest(each.name.encode())) not in self._digests
        }
        due = {digest: each for digest, each in news.items() if self._is_due(each)}
        keys = dict.fromkeys(key for each in due.values() for key in each.keys)
        if keys and not is_true(self._forget(list(keys)), _WAIT_S):
            # Hidden all the same; the next start forgets them again.
            news = {digest: each for digest, each in news.items() if digest not in due}
        if not news:
            return
        self._digests.update(dict.fromkeys(news))
        while len(self._digests) > MAX_ENTRIES:
            del self._digests[next(iter(self._digests))]
        self._write()

    def _is_due(self, tombstone: Tombstone) -> bool:
        return bool(tombstone.keys) and tombstone.bound_ms >= self._empty_until_ms

    def _write(self) -> None:
        try:
            self._notes.write(APPLIED_FORGETS_NAME, seal(_File(VERSION, list(self._digests))))
        except OSError as error:
            self._log.report(
                "forgets",
                "the note of forgotten pages cannot be written (%s); until it can, a restart "
                "forgets what was stored since again",
                error,
            )
        else:
            self._log.settle("forgets")
