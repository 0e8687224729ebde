"""``Followers``: who follows this server, each with one question or one answer under way.

A follower asks again once it has its answer: that is the flow control, and nothing is kept for it
but what it asks. The page server's thread only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sglang_tiered.sharing.pages.messages import (
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

    import zmq

    from sglang_tiered.sharing.erasures import ErasureBook
    from sglang_tiered.sharing.holdings import Holdings

    Send = Callable[[bytes, Any, Sequence[memoryview]], list[zmq.MessageTracker] | None]


SIGN_OF_LIFE_S = 2.0
"""A follower that there is nothing to tell is answered after so long."""

_MAX_FOLLOWERS = 1024

assert MAX_FINGERPRINTS * 8 <= 1 << 20, "one frame"


class Told(Protocol):
    """What followers are told. Memory only; the server's thread calls it."""

    @property
    def namespace(self) -> bytes: ...

    @property
    def server(self) -> bytes: ...

    @property
    def digest(self) -> bytes: ...

    @property
    def holdings(self) -> Holdings: ...

    @property
    def book(self) -> ErasureBook: ...

    def taught(self, erasures: Sequence[ErasureNotice]) -> None:
        """Take erasures that another server knows, to be applied."""


@dataclass(eq=False, slots=True)
class _FollowerState:
    question: Follow | None = None  # without an answer
    asked_at: float = 0.0
    sending: Sequence[zmq.MessageTracker] = ()  # fingerprints that have not left

    @property
    def is_blocked(self) -> bool:
        return self.question is not None and not all(tracker.done for tracker in self.sending)


class Followers:
    """``send`` sends to a client, and returns None if it is gone or reads nothing."""

    def __init__(self, told: Told, send: Send, clock: Callable[[], float]) -> None:
        self._told = told
        self._send = send
        self._clock = clock
        self._known: dict[bytes, _FollowerState] = {}

    def hear(self, client: bytes, message: Follow | Compare | Teach) -> None:
        """Serve a message. Raises ``TransferError`` for a breach of the protocol."""
        told = self._told
        if isinstance(message, Follow):
            self._follow(client, message)
        elif message.namespace != told.namespace:
            if isinstance(message, Compare):  # it hears of the other one by its next answer
                self._send(client, Erasures(told.digest, [], b""), ())
        elif isinstance(message, Compare):
            self._send(client, Erasures(*told.book.compare(message.ids)), ())
        else:
            for each in message.erasures:
                each.split_keys()  # raises
            told.taught(message.erasures)

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
        question, told = known.question, self._told
        if question is None or known.is_blocked:
            return
        namespace, digest = told.namespace, told.digest
        if question.namespace == namespace:
            position = question.epoch, question.sequence, question.cursor
            said, payload = told.holdings.since(*position)
            _, _, start, *_ = said
            at_once = at_once or bool(payload) or start is not None or digest != question.told
        else:  # its name is told to nobody who does not know it
            said, payload = (0, question.sequence, None, None, 0, 0, False), b""
            namespace = hashlib.sha256(namespace).digest()
            at_once = at_once or question.epoch > 0  # it does not know yet that this is another
        if not at_once:
            return
        answer = Changes(namespace, told.server, digest, *said)
        sent = self._send(client, answer, [memoryview(payload)] if payload else [])
        if sent is None:
            self._known.pop(client, None)
        known.question, known.sending = None, sent or ()
