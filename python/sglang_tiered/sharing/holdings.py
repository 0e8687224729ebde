"""What this server holds of one namespace, for those who follow it: a snapshot in pieces, and
changes since.

Nothing is kept for a follower. A piece of the snapshot is cut from what is held *now*. A reader of
all pieces applies the changes since the first of them, in order, and has what is held. The last
change of a page says so, and a page without one has been there, or not, all the time.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.sharing.mirror import distinct
from sglang_tiered.sharing.pages.messages import MAX_FINGERPRINTS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Fingerprints = npt.NDArray[np.uint64]
    Held = Callable[[int], tuple[int, Fingerprints] | None]
    Said = tuple[int, int, int | None, int | None, int, int, bool]
    # epoch, sequence, start, end, num_added, num_removed, more


_MIN_LOG = 1 << 18  # fingerprints of changes that are kept: 2 MiB, or as many as are held
_NONE = np.empty(0, np.uint64)


class Holdings:
    """``held(version)`` returns a version above 0 and the fingerprints that a load here could serve
    now, in any order; None if it is still ``version``. ``look`` is called by one thread, the rest
    by any."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._lock = threading.Lock()
        self._version = 0
        self._pages = _NONE
        self.epoch = secrets.randbits(62) | 1
        self.sequence = 0
        self._log: deque[tuple[Fingerprints, Fingerprints]] = deque()  # the last ``sequence``
        self._log_size = 0

    def look(self) -> bool:
        """Take up what came and went. Returns whether there was anything."""
        before = self._pages
        found = self._held(self._version)
        if found is None:
            return False
        version, pages = found
        pages = distinct(pages)
        added, removed = _changed(before, pages)
        with self._lock:
            self._version, self._pages = version, pages
            if not len(added) and not len(removed):
                return False
            step = max(MAX_FINGERPRINTS // 2, 1)  # of each
            for at in range(0, max(len(added), len(removed)), step):
                self._log.append((added[at : at + step], removed[at : at + step]))
                self.sequence += 1
            self._log_size += len(added) + len(removed)
            while self._log_size > max(_MIN_LOG, len(pages)):
                gone = self._log.popleft()
                self._log_size -= len(gone[0]) + len(gone[1])
        return True

    def since(self, epoch: int, sequence: int, cursor: int | None) -> tuple[Said, bytes]:
        """Return the next part for a follower that has these, as ``messages.Changes`` says it, and
        its payload. Without payload or ``start`` there is nothing new."""
        with self._lock:
            if epoch != self.epoch or (
                cursor is None and not self.sequence - len(self._log) <= sequence <= self.sequence
            ):
                cursor = 0
            if cursor is not None:
                return self._piece(cursor, sequence)
            num_left = self.sequence - sequence
            if not num_left:
                return (self.epoch, sequence, None, None, 0, 0, False), b""
            added, removed = self._log[-num_left]
            sizes = len(added), len(removed)
            said = (self.epoch, sequence + 1, None, None, *sizes, num_left > 1)
            return said, added.tobytes() + removed.tobytes()

    def _piece(self, start: int, begun_at: int) -> tuple[Said, bytes]:
        pages = self._pages
        at = int(np.searchsorted(pages, np.uint64(min(start, (1 << 64) - 1))))
        piece = pages[at : at + MAX_FINGERPRINTS]
        is_last = at + len(piece) >= len(pages)
        end = None if is_last else int(piece[-1])
        has_changed = start > 0 and begun_at != self.sequence  # since the first piece
        more = not is_last or has_changed
        said = (self.epoch, self.sequence, start, end, len(piece), 0, more)
        return said, piece.tobytes()


def _changed(before: Fingerprints, pages: Fingerprints) -> tuple[Fingerprints, Fingerprints]:
    """Return which of these pages were not there before, and which are gone. All are sorted, each
    once, so a stable sort only merges them."""
    both = np.concatenate([before, pages])
    both.sort(kind="stable")
    edges = np.ones(len(both) + 1, np.bool_)
    np.not_equal(both[1:], both[:-1], out=edges[1:-1])
    changed = both[edges[1:] & edges[:-1]]
    at = np.searchsorted(before, changed)
    at[at == len(before)] = 0
    is_gone = before[at] == changed if len(before) else np.zeros(len(changed), np.bool_)
    return changed[~is_gone], changed[is_gone]
