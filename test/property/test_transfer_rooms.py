"""The rooms of prefill against a model: whatever the order of requests, claims, opens, failures and
time, a room is complete exactly when both halves are here, and nothing is kept for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_tiered.config import TransferConfig
from sglang_tiered.transfer import rooms as prefill_rooms
from sglang_tiered.transfer.messages import Claim, Open
from sglang_tiered.transfer.rooms import ANOTHER_NUMBER, RoomTable

MAX_ORPHANS, MAX_TOMBSTONES = 3, 4
ORPHAN_TIMEOUT_S, TOMBSTONE_S = 10.0, 30.0

numbers = st.integers(0, 5)
sessions = st.sampled_from(["a", "b", "c"])


class RoomMachine(RuleBasedStateMachine):
    """``PrefillEndpoint`` without sockets: it buries what fails and removes what was sent."""

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefill_rooms, "MAX_TOMBSTONES", MAX_TOMBSTONES)
        settings = TransferConfig(
            max_orphans=MAX_ORPHANS, orphan_timeout_s=ORPHAN_TIMEOUT_S, tombstone_s=TOMBSTONE_S
        )
        self.table: RoomTable[str] = RoomTable(settings)
        self.now = 0.0
        self.expected: set[int] = set()
        self.opens: dict[int, dict[str, Open]] = {}
        self.buried: dict[int, tuple[float, str]] = {}
        self.generation = 0

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    def forget(self, number: int) -> None:
        self.expected.discard(number)
        self.opens.pop(number, None)

    def failure_of(self, number: int) -> str | None:
        at, reason = self.buried.get(number, (0.0, None))
        if reason is None or self.now - at >= TOMBSTONE_S:
            return None
        return f"{reason}; for another try, {ANOTHER_NUMBER}"

    @rule(number=numbers)
    def expect(self, number: int) -> None:
        room = self.table.expect_room(number, self.now)
        reason = self.failure_of(number)
        if reason is not None:
            assert room == reason
        else:
            assert not isinstance(room, str)
            self.expected.add(number)

    @rule(number=numbers, session=sessions)
    def claim(self, number: int, session: str) -> None:
        room = self.table.claim_room(session, Claim(number, bytes(32)), self.now)
        if not isinstance(room, str):
            self.opens.setdefault(number, {})

    @rule(number=numbers, session=sessions, num_receivers=st.integers(1, 3))
    def open(self, number: int, session: str, num_receivers: int) -> None:
        self.generation += 1
        message = Open(number, self.generation, 1, [], 0, num_receivers, False, bytes(32))
        was_here = number in self.expected or number in self.opens
        known = self.table.get(number)
        is_taken = known is not None and (known.is_ready or session in known.opens)
        room = self.table.open_room(session, message, self.now)
        reason = self.failure_of(number)
        if reason is not None:
            assert room == reason
        elif is_taken:
            assert isinstance(room, str), "nobody's pages are replaced"
        elif isinstance(room, str):
            assert not was_here
            assert self.table.num_orphans == MAX_ORPHANS
        else:
            self.opens.setdefault(number, {})[session] = message
            if room.is_complete:
                room.is_ready = True  # as the endpoint does

    @rule(number=numbers)
    def fail(self, number: int) -> None:
        reason = f"failed at {self.now}"
        self.table.fail_room(number, reason, self.now)
        self.buried.pop(number, None)
        self.buried[number] = self.now, reason
        while len(self.buried) > MAX_TOMBSTONES:
            del self.buried[next(iter(self.buried))]
        self.forget(number)

    @rule(number=numbers)
    def finish(self, number: int) -> None:
        self.table.remove_room(number)
        self.forget(number)

    @rule(seconds=st.integers(0, 20))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        for room in self.table.overdue(self.now):
            assert not room.is_ready
            assert self.now - room.created_at >= ORPHAN_TIMEOUT_S
            self.fail(room.number)

    @invariant()
    def both_agree(self) -> None:
        if not hasattr(self, "table"):
            return
        assert len(self.table) == len(self.expected | self.opens.keys())
        assert self.table.num_orphans == len(self.opens.keys() - self.expected) <= MAX_ORPHANS
        assert len(self.table._tombstones) <= MAX_TOMBSTONES
        for number in self.expected | self.opens.keys():
            room = self.table.get(number)
            assert room is not None
            opens = self.opens.get(number, {})
            assert room.opens == opens
            assert room.is_expected == (number in self.expected)
            first = next(iter(opens.values()), None)
            complete = first is not None and len(opens) >= first.num_receivers
            assert room.is_complete == (complete and number in self.expected)
            for session in opens:
                assert room in self.table.of_session(session)

    @invariant()
    def what_waits_for_its_other_half_is_not_kept_for_ever(self) -> None:
        if hasattr(self, "table"):
            late = self.table.overdue(self.now + ORPHAN_TIMEOUT_S)
            waiting = {number for number in self.opens if number not in self.expected}
            assert waiting <= {room.number for room in late}


RoomMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRooms = RoomMachine.TestCase
