"""``PurgeMemory``: which purges this server's store has applied for good, across restarts.

Without it a server that starts would apply every purge again that Redis still knows, and lose what
was stored since. A purge is remembered only once it is durable in the store: one that is not is
applied again, which is never too little.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.sharing.locality.formats import unpack_purge
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.region.files import APPLIED_PURGES_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.sharing.locality.purges import PurgeBook

__all__ = ["NoteStore", "PurgeMemory"]

VERSION = 1
MAX_ENTRIES = 32_768  # of all namespaces; a server has one, and one more for each change of weights

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


class PurgeMemory:
    """``recall`` before any thread runs, ``remember`` on one thread. ``clock`` is the book's."""

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
        """Tell the book what was remembered. What does not verify was never applied."""
        file = unseal(self._notes.read(APPLIED_PURGES_NAME), _File)
        offset_s = self._clock() - self._wall_clock()
        for entry in file.entries if file is not None and file.version == VERSION else ():
            if unpack_purge(entry.member) is not None:
                self._written[entry.namespace, entry.member] = entry.forget_at
        for (namespace, member), forget_at in self._written.items():
            self._book.recall(namespace, member, forget_at + offset_s)

    def remember(self) -> None:
        """Write down what has become durable since. Waits for the disk; a note that cannot be
        written is tried again the next time."""
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
