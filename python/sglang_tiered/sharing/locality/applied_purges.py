"""``AppliedPurges``: the purges that are durable in this server's store, across restarts.

Without it a starting server would apply every purge again that Redis still knows, and lose the
pages stored since. A purge is noted only once it is durable in the store: any other is applied
again, which is always safe."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.sharing.locality.formats import unpack_forget, unpack_purge
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.region.files import APPLIED_PURGES_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.sharing.locality.purges import PurgeBook

__all__ = ["NoteStore", "AppliedPurges"]

VERSION = 1
MAX_ENTRIES = 32_768  # over all namespaces; each change of weights begins one

logger = logging.getLogger(__name__)


class NoteStore(Protocol):
    """Small files beside the pages: ``storage.region.notes``. Both wait for the disk."""

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None: ...


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    namespace: bytes
    member: bytes
    forget_at: float  # seconds since 1970, of this machine's clock


class _File(msgspec.Struct, frozen=True, array_like=True):
    version: int
    entries: list[_Entry]


class AppliedPurges:
    """Call ``recall`` before any thread runs, ``remember`` on one thread. ``clock`` is the
    book's."""

    def __init__(
        self,
        notes: NoteStore,
        book: PurgeBook,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._notes = notes
        self._book = book
        self._clock = clock
        self._wall_clock = wall_clock
        self._written: dict[tuple[bytes, bytes], float] = {}
        self._log = OnceLog(logger)

    def recall(self) -> None:
        """Add the noted purges to the book. A note that does not verify is ignored."""
        file = unseal(self._notes.read(APPLIED_PURGES_NAME), _File)
        offset_s = self._clock() - self._wall_clock()
        for entry in file.entries if file is not None and file.version == VERSION else ():
            if (unpack_purge(entry.member) or unpack_forget(entry.member)) is not None:
                self._written[entry.namespace, entry.member] = entry.forget_at
        for (namespace, member), forget_at in self._written.items():
            self._book.recall(namespace, member, forget_at + offset_s)

    def remember(self) -> None:
        """Note the purges that have become durable since. Waits for the disk; a failed write is
        retried with the next call."""
        namespace, settled = self._book.settled()
        known = {member for of, member in self._written if of == namespace}
        if settled.keys() == known:
            return
        now, offset_s = self._wall_clock(), self._wall_clock() - self._clock()
        kept = {
            (of, member): forget_at
            for (of, member), forget_at in self._written.items()
            if of != namespace and forget_at > now
        }
        newest = sorted(kept.items(), key=lambda entry: -entry[1])
        kept = dict(newest[: max(0, MAX_ENTRIES - len(settled))])
        kept |= {(namespace, member): at + offset_s for member, at in settled.items()}
        try:
            entries = [_Entry(*key, at) for key, at in kept.items()]
            self._notes.write(APPLIED_PURGES_NAME, seal(_File(VERSION, entries)))
        except OSError as error:
            self._log.report(
                "write",
                "%s cannot be written (%s); until it can, a restart applies purges again",
                APPLIED_PURGES_NAME,
                error,
            )
            return
        self._written = kept
        self._log.settle("write")
