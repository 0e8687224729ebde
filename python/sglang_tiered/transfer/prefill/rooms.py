"""The rooms of a prefill endpoint: which request waits for which decode ranks. Pure; no I/O.

A room is complete when its request is here (``expect_room``) and every decode rank has opened it.
Either may come first; a decode rank claims a room when its request comes, and opens it when it has
the memory. A failure is remembered for a while, so that the half that comes late learns it at once
instead of waiting for its timeout. Another request with the number learns it too.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from sglang_tiered.transfer.messages import NOTHING_MORE
from sglang_tiered.transfer.same_host import Fence

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from sglang_tiered.config import TransferConfig
    from sglang_tiered.transfer.messages import Asked, Claim, Open


MAX_TOMBSTONES = 16384

ANOTHER_NUMBER = "draw another bootstrap_room."
"""What a client does whose number is taken. SGLang's router draws one for every try."""

SessionT = TypeVar("SessionT", bound="Hashable")


@dataclass(eq=False, slots=True)
class Room(Generic[SessionT]):
    """One request's handoff. ``unfinished``: sessions that have not confirmed the whole room.
    ``models``: of the decode ranks that claimed or opened it, in the words of ``messages.Open``;
    once it is ready, of those that opened it. ``asked``: what this request adds to the model.
    ``fence`` is closed before its pages may go to another request."""

    number: int
    created_at: float
    is_expected: bool = False
    is_ready: bool = False
    is_last_queued: bool = False
    opens: dict[SessionT, Open] = field(default_factory=dict)
    models: dict[SessionT, bytes] = field(default_factory=dict)
    asked: Asked = NOTHING_MORE
    unfinished: set[SessionT] = field(default_factory=set)
    fence: Fence = field(default_factory=Fence)

    @property
    def is_complete(self) -> bool:
        """Whether the request and all decode ranks are here."""
        first = next(iter(self.opens.values()), None)
        return self.is_expected and first is not None and len(self.opens) >= first.num_receivers


class RoomTable(Generic[SessionT]):
    """All rooms of one prefill rank. Used by one thread; time is passed in, in seconds."""

    def __init__(self, settings: TransferConfig) -> None:
        self._settings = settings
        self._rooms: dict[int, Room[SessionT]] = {}
        self._orphans: set[int] = set()  # rooms that wait for a request
        self._tombstones: OrderedDict[int, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[Room[SessionT]]:
        """Every room there is now; rooms may go meanwhile."""
        return iter(list(self._rooms.values()))

    @property
    def num_orphans(self) -> int:
        return len(self._orphans)

    def get(self, number: int) -> Room[SessionT] | None:
        return self._rooms.get(number)

    def of_session(self, session: SessionT) -> list[Room[SessionT]]:
        return [room for room in self._rooms.values() if session in room.models]

    def expect_room(self, number: int, now: float) -> Room[SessionT] | str:
        """Note that a room's request is here. Returns the room, or why it has failed already."""
        reason = self._failure_of(number, now)
        if reason is not None:
            return reason
        room = self._rooms.setdefault(number, Room(number, now))
        self._orphans.discard(number)
        room.is_expected = True
        return room

    def claim_room(
        self, session: SessionT, message: Claim | Open, now: float
    ) -> Room[SessionT] | str:
        """Note that a decode rank has the room's request. Returns the room, or why it has failed
        already."""
        number = message.room
        reason = self._failure_of(number, now)
        if reason is not None:
            return reason
        room = self._rooms.get(number)
        if room is None:
            if len(self._orphans) >= self._settings.max_orphans:
                return (
                    f"prefill already holds {len(self._orphans)} rooms whose requests never came; "
                    "does the router send every request to both?"
                )
            room = self._rooms[number] = Room(number, now)
            self._orphans.add(number)
        if not room.is_ready:
            room.models.setdefault(session, message.model)
        return room

    def open_room(self, session: SessionT, message: Open, now: float) -> Room[SessionT] | str:
        """Note that a decode rank has allocated pages. Returns the room, or why it has failed
        already."""
        room = self.claim_room(session, message, now)
        if isinstance(room, str):
            return room
        if not room.is_ready:
            room.opens.setdefault(session, message)
        if message != room.opens.get(session):
            # Another rank's room, or another request's, whose pages replace nobody's.
            return f"prefill serves this room number already; {ANOTHER_NUMBER}"
        room.models[session] = message.model
        return room

    def remove_room(self, number: int) -> Room[SessionT] | None:
        """Drop a room that was sent, or whose failure both sides know."""
        self._orphans.discard(number)
        return self._rooms.pop(number, None)

    def fail_room(self, number: int, reason: str, now: float) -> Room[SessionT] | None:
        """Drop a room that failed; the half that comes later is told ``reason``."""
        self._tombstones[number] = now, reason
        self._tombstones.move_to_end(number)
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        return self.remove_room(number)

    def overdue(self, now: float) -> list[Room[SessionT]]:
        """The rooms whose other half did not come in time."""
        latest = now - self._settings.orphan_timeout_s
        return [
            room
            for room in self._rooms.values()
            if room.created_at <= latest and not (room.is_expected and room.models)
        ]

    def _failure_of(self, number: int, now: float) -> str | None:
        while self._tombstones:
            at, _ = next(iter(self._tombstones.values()))
            if now - at < self._settings.tombstone_s:
                break
            self._tombstones.popitem(last=False)
        tombstone = self._tombstones.get(number)
        if tombstone is None:
            return None
        return f"{tombstone[1].rstrip('.')}; for another try, {ANOTHER_NUMBER}"
