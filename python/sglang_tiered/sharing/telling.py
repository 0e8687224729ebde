"""What this server tells those who follow it: what it holds, and whom it owes an answer.

``Holdings`` is a snapshot in pieces, and changes since. Nothing is kept for a follower: a piece of
the snapshot is cut from what is held *now*. A reader of all pieces applies the changes since the
first of them, in order, and has what is held. The last change of a page says so, and a page without
one has been there, or not, all the time.

Each of ``Followers`` has one question under way, and is owed one answer. It asks again once it has
that: this is the flow control.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.sharing.mirror import distinct
from sglang_tiered.sharing.pages.messages import (
    ID_BYTES,
    MAX_FINGERPRINTS,
    Changes,
    Compare,
    ErasureNotice,
    Erasures,
    Follow,
    Teach,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import zmq

    from sglang_tiered.sharing.erasures import ErasureBook

    Fingerprints = npt.NDArray[np.uint64]
    Held = Callable[[int], tuple[int, Fingerprints] | None]
    Said = tuple[int, int, int | None, int | None, int, int, bool]
    # epoch, sequence, start, end, num_added, num_removed, more
    Send = Callable[[bytes, Any, Sequence[memoryview]], list[zmq.MessageTracker] | None]


SIGN_OF_LIFE_S = 2.0
"""A follower that there is nothing to tell is answered after so long."""

_MIN_LOG = 1 << 18  # fingerprints of changes that are kept: 2 MiB, or as many as are held
_NONE = np.empty(0, np.uint64)
_MAX_FOLLOWERS = 1024

assert MAX_FINGERPRINTS * 8 <= 1 << 20, "one frame"


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


@dataclass(eq=False, slots=True)
class _FollowerState:
    question: Follow | None = None  # without an answer
    asked_at: float = 0.0
    sending: Sequence[zmq.MessageTracker] = ()  # fingerprints that have not left

    @property
    def is_blocked(self) -> bool:
        return self.question is not None and not all(tracker.done for tracker in self.sending)


class Followers:
    """The page server's thread, which sets ``send``: that sends to a client, and returns None if it
    is gone or reads nothing. What is told any thread may set: ``namespace``, ``holdings`` and
    ``digest``. That is of the erasures that a restart does not undo, and whose pages followers are
    told to be gone, or will be first. ``taught`` takes erasures that another server knows."""

    send: Send

    def __init__(
        self,
        namespace: bytes,
        held: Held,
        book: ErasureBook,
        taught: Callable[[Sequence[ErasureNotice]], None],
        clock: Callable[[], float],
    ) -> None:
        self.server = secrets.token_bytes(ID_BYTES)
        self.namespace = namespace
        self.holdings = Holdings(held)
        self.digest = book.noted_digest
        self._book = book
        self._taught = taught
        self._clock = clock
        self._known: dict[bytes, _FollowerState] = {}

    def hear(self, client: bytes, message: Follow | Compare | Teach) -> None:
        """Serve a message. Raises ``TransferError`` for a breach of the protocol."""
        if isinstance(message, Follow):
            self._follow(client, message)
        elif message.namespace != self.namespace:
            if isinstance(message, Compare):  # it hears of the other one by its next answer
                self.send(client, Erasures(self.digest, [], b""), ())
        elif isinstance(message, Compare):
            self.send(client, Erasures(*self._book.compare(message.ids)), ())
        else:
            for each in message.erasures:
                each.split_keys()  # raises
            self._taught(message.erasures)

    def _follow(self, client: bytes, question: Follow) -> None:
        known = self._known.get(client)
        if known is None:
            if len(self._known) >= _MAX_FOLLOWERS:
                self._known.pop(next(iter(self._known)))  # it asks again, or is gone
            known = self._known[client] = _FollowerState()
        known.question, known.asked_at = question, self._clock()
        self._answer(client, known)

    def answer_all(self) -> None:
        """Answer the questions that there is an answer to."""
        for client, known in list(self._known.items()):
            self._answer(client, known)

    def step(self) -> bool:
        """Answer who waited for an answer to leave. Returns whether some still wait for that."""
        blocked = [(client, known) for client, known in self._known.items() if known.sending]
        for client, known in blocked:
            if not known.is_blocked:
                self._answer(client, known)
        return any(known.is_blocked for _, known in blocked)

    def tick(self) -> None:
        """Give signs of life, and drop who has asked nothing for long."""
        now = self._clock()
        for client, known in list(self._known.items()):
            if known.question is None:
                if now - known.asked_at > 10 * SIGN_OF_LIFE_S:
                    del self._known[client]
            elif now - known.asked_at >= SIGN_OF_LIFE_S:
                self._answer(client, known, at_once=True)

    def _answer(self, client: bytes, known: _FollowerState, *, at_once: bool = False) -> None:
        """Answer a question, if there is one, once there is something to say."""
        question = known.question
        if question is None or known.is_blocked:
            return
        namespace, digest = self.namespace, self.digest
        if question.namespace == namespace:
            position = question.epoch, question.sequence, question.cursor
            said, payload = self.holdings.since(*position)
            _, _, start, *_ = said
            at_once = at_once or bool(payload) or start is not None or digest != question.told
        else:  # its name is told to nobody who does not know it
            said, payload = (0, question.sequence, None, None, 0, 0, False), b""
            namespace = hashlib.sha256(namespace).digest()
            at_once = at_once or question.epoch > 0  # it does not know yet that this is another
        if not at_once:
            return
        answer = Changes(namespace, self.server, digest, *said)
        sent = self.send(client, answer, [memoryview(payload)] if payload else [])
        if sent is None:
            self._known.pop(client, None)
        known.question, known.sending = None, sent or ()
