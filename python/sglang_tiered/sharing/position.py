"""``Position``: how far a follower has read what one server holds, and what it asks next.

It takes answers and keeps the mirror, and knows no socket. An answer that does not follow on what
is known changes nothing: the same is asked again, and a server answers from any position. So it
does not matter which answers were lost, or came twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.pages.messages import ID_BYTES, MAX_FINGERPRINTS, Changes, Follow

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from sglang_tiered.sharing.mirror import Mirror, MirroredPeer

    Fingerprints = npt.NDArray[np.uint64]


_UNTOLD = b"\xff" * ID_BYTES  # no digest: who says so is answered at once


@dataclass(eq=False, slots=True)
class Position:
    """Of one server, over its connections. One question at a time is asked."""

    mirror: Mirror
    epoch: int = 0
    sequence: int = 0  # of the last change that is known
    cursor: int | None = 0  # the next fingerprint of a snapshot; None: all of it is known
    num_taken: int = 0  # fingerprints of the snapshot
    num_snapshots: int = 0
    told: bytes = _UNTOLD  # the server's last digest
    is_asked: bool = False  # and not answered

    def connect(self) -> None:
        """Have the next question answered at once."""
        self.is_asked, self.told = False, _UNTOLD

    def forget(self) -> None:
        """Begin anew, with another server or without the pages of this one."""
        self.epoch, self.cursor = 0, 0

    def ask(self, namespace: bytes, server: bytes, digest: bytes) -> Follow:
        """Return the next question of a follower, with its id and its digest of erasures."""
        self.is_asked = True
        position = self.epoch, self.sequence, self.cursor
        return Follow(namespace, server, digest, self.told, *position)

    def hear(self, message: Changes) -> None:
        """Note that the question was answered. Raises ``TransferError`` where there was none."""
        if not self.is_asked:
            raise TransferError("a page server answered what it was not asked.")
        self.is_asked, self.told = False, message.digest

    def take(
        self, known: MirroredPeer, message: Changes, payload: Iterable[bytes | memoryview]
    ) -> None:
        """Take up what came and went of the pages of a server. Where they do not all fit, only
        their number is kept (``num_cut``), until there is room. Raises ``TransferError`` for a
        breach of the protocol."""
        added, removed = _changed_pages(message, payload)
        if message.start == 0:
            self.mirror.unload(known)
            self.epoch, self.sequence, self.cursor = message.epoch, message.sequence, 0
            self.num_taken = 0
            self.num_snapshots += 1
        if message.epoch != self.epoch:
            return
        if message.start is not None:
            if message.start == self.cursor and message.sequence >= self.sequence:
                self._take_piece(known, message, added)
        elif self.cursor is None and message.sequence == self.sequence + 1:
            self._take_change(known, added, removed)
        if self.cursor is None and self.mirror.has_room(known):
            self.cursor = 0

    def _take_piece(self, known: MirroredPeer, message: Changes, added: Fingerprints) -> None:
        self.num_taken += max(len(added), 1)
        if self.num_taken > 4 * self.mirror.max_pages + MAX_FINGERPRINTS:
            raise TransferError("a page server names pages without an end.")
        cursor = None if message.end is None else message.end + 1
        if not self.mirror.add_pages(known, added):
            part = (cursor or 1 << 64) / (1 << 64)  # fingerprints are spread evenly
            self.mirror.cut(known, int(self.num_taken / part))
            cursor = None
        elif cursor is None:
            self.mirror.loaded(known)
        self.cursor = cursor

    def _take_change(self, known: MirroredPeer, added: Fingerprints, removed: Fingerprints) -> None:
        if known.num_cut:
            known.num_cut = max(known.num_cut + len(added) - len(removed), 1)
        else:
            self.mirror.remove_pages(known, removed)
            if not self.mirror.add_pages(known, added):
                self.mirror.cut(known, known.num_pages + len(added))
        self.sequence += 1


def _changed_pages(
    message: Changes, payload: Iterable[bytes | memoryview]
) -> tuple[Fingerprints, Fingerprints]:
    """Return the fingerprints that came and went. Raises ``TransferError`` for a breach."""
    data = b"".join(payload)
    if len(data) != 8 * (message.num_added + message.num_removed):
        raise TransferError(
            f"a page server sent {len(data)} bytes for {message.num_added} pages that came and "
            f"{message.num_removed} that went."
        )
    if message.end is not None and not (message.start or 0) <= message.end < 1 << 64:
        raise TransferError("a page server sent a piece that ends before it begins.")
    pages = np.frombuffer(data, "<u8")
    return pages[: message.num_added], pages[message.num_added :]
