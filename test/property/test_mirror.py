"""What is known of other servers against a model: any order of changes, and of reading them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_tiered.errors import TransferError
from sglang_tiered.sharing import mirror, telling
from sglang_tiered.sharing.mirror import Mirror, MirroredPeer
from sglang_tiered.sharing.pages.messages import Changes
from sglang_tiered.sharing.telling import Holdings

NOTHING, SOMETHING = bytes(16), b"p" * 16
FACTOR = 0x9E37_79B9_7F4A_7C15
pages_lists = st.lists(st.integers(0, 60), max_size=30)
peers = st.integers(0, 5)


def peer_of(number: int) -> tuple[str, str]:
    """The id and the address of a server."""
    return f"{number:032x}", f"tcp://192.0.2.{number}:1"


def fingerprints(pages: Any, factor: int = FACTOR) -> np.ndarray:
    """Small numbers as fingerprints anywhere, zero staying zero."""
    return np.array([page * factor % (1 << 64) for page in pages], np.uint64)


# ---- A follower of one server ----


class Followed:
    """A server that holds pages, and a follower that reads what it tells."""

    def __init__(self, max_pages: int = 1000) -> None:
        self.now, self.version = {1, 2, 3}, 1
        self.source = Holdings(self.held)
        self.mirror = Mirror(max_pages, 1, salt=1, digest=lambda: NOTHING, clock=lambda: 0.0)
        known = self.mirror.join(*peer_of(1))
        assert known is not None
        self.known: MirroredPeer = known
        self.num_snapshots = 0
        self.last: tuple[Changes, list[bytes]] | None = None

    def held(self, known: int) -> tuple[int, np.ndarray] | None:
        return None if known == self.version else (self.version, fingerprints(self.now))

    def change(self, pages: Any) -> None:
        self.now = (self.now ^ set(pages)) - {0}
        self.version += 1
        self.source.look()

    def answer(self) -> tuple[Changes, list[bytes]]:
        said, payload = self.source.since(*self.known.position)
        assert len(payload) <= 8 * max(telling.MAX_FINGERPRINTS, 2), "no follower takes more"
        return Changes(bytes(32), b"s" * 16, NOTHING, *said), [payload]

    def read(self, how: str = "once") -> bool:
        """Ask once; what is answered gets lost, comes twice, or after what was answered to the
        next question. Returns whether there was any news."""
        answer = self.answer()
        late, self.last = self.last, answer
        if how == "lost":
            return True
        for each in {"once": [answer], "twice": [answer] * 2, "late": [late or answer]}[how]:
            self.num_snapshots += each[0].start == 0
            self.mirror.take(self.known, *each)
        return bool(answer[1][0]) or answer[0].start is not None

    def read_all(self) -> None:
        for _ in range(1000):
            if not self.read():
                return
        raise AssertionError("it reads without an end")

    def mirrored(self) -> set[int]:
        self.mirror.check_integrity()
        bits = self.mirror.holders(fingerprints(range(61)))[0]
        return {page for page, bit in enumerate(bits.tolist()) if bit}


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            pages_lists,
            st.lists(st.sampled_from(["once", "once", "lost", "twice", "late"]), max_size=4),
            st.sampled_from(["", "", "", "epoch", "forgets"]),
        ),
        max_size=12,
    ),
    piece=st.integers(1, 7),
    log=st.integers(0, 40),
    max_pages=st.sampled_from([10, 40, 1000]),
)
def test_a_follower_ends_with_what_is_held(
    steps: list[tuple[list[int], list[str], str]], piece: int, log: int, max_pages: int
) -> None:
    """Whatever becomes of answers, whenever it reads, and however often numbers begin anew. Of
    what does not fit nothing is known."""
    old = telling.MAX_FINGERPRINTS, telling._MIN_LOG
    telling.MAX_FINGERPRINTS, telling._MIN_LOG = piece, log
    try:
        one = Followed(max_pages)
        for pages, reads, event in steps:
            one.change(pages)
            if event == "epoch":
                one.source = Holdings(one.held)
                one.source.look()
            elif event == "forgets":
                one.mirror.unload(one.known)
                one.known.epoch, one.known.cursor = 0, 0
            for how in reads:
                one.read(how)
        one.source.look()
        one.read_all()
        if one.known.num_cut:
            assert one.mirrored() == set()
        else:
            assert one.mirrored() == one.now and one.known.is_loaded
            num_snapshots = one.num_snapshots
            one.change([59])
            one.read_all()
            assert one.known.num_cut or one.mirrored() == one.now
            if log > 2:
                assert one.num_snapshots == num_snapshots
    finally:
        telling.MAX_FINGERPRINTS, telling._MIN_LOG = old


def test_pages_beyond_the_bound_wait_for_room() -> None:
    one = Followed(max_pages=40)
    one.change(range(4, 61))
    one.read_all()
    assert one.mirrored() == set() and one.known.num_cut == 60
    one.change(range(1, 16))
    one.read_all()
    assert one.mirrored() == set(), "there are 45"
    one.change(range(16, 31))
    one.read_all()
    assert one.mirrored() == set(range(31, 61))


def test_who_begins_cuts_nobody_known() -> None:
    """The last twentieth is for what those store that are known."""
    mirror = Mirror(100, 2, salt=1, digest=lambda: NOTHING, clock=lambda: 0.0)
    one, two = mirror.join(*peer_of(1)), mirror.join(*peer_of(2))
    assert one is not None and two is not None
    assert mirror.add_pages(one, fingerprints(range(1, 91)))
    mirror.loaded(one)
    assert not mirror.add_pages(two, fingerprints(range(201, 209)))
    mirror.cut(two, 8)
    assert mirror.add_pages(one, fingerprints(range(91, 99)))


def changes(**more: Any) -> Changes:
    named = {"epoch": 7, "sequence": 1, "start": 0, "end": None, "num_added": 1, "num_removed": 0}
    return Changes(bytes(32), b"s" * 16, NOTHING, **{**named, "more": False, **more})


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (changes(num_added=2), bytes(8)),
        (changes(), bytes(4)),
        (changes(), bytes(16)),
        (changes(start=9, end=3), bytes(8)),
    ],
)
def test_a_misfit_answer_is_a_breach(message: Changes, payload: bytes) -> None:
    one = Followed()
    with pytest.raises(TransferError):
        one.mirror.take(one.known, message, [payload])


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (99, changes(start=100, epoch=8)),
        (99, changes(start=50)),
        (99, changes(start=100, sequence=0)),  # cut before the snapshot began
        (99, changes(start=None, sequence=2)),
        (None, changes(start=None, sequence=1)),
        (None, changes(start=None, sequence=3)),
        (None, changes(start=None, sequence=2, epoch=8)),
        (None, changes(start=50)),
    ],
)
def test_an_answer_that_does_not_follow_changes_nothing(end: int | None, message: Changes) -> None:
    one = Followed()
    first, other = (fingerprints([page]).tobytes() for page in (5, 6))
    one.mirror.take(one.known, changes(end=end), [first])
    before = one.known.position
    one.mirror.take(one.known, message, [other])
    assert one.known.position == before
    assert one.mirrored() == {5}


def test_endless_pages_of_a_liar_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "MAX_FINGERPRINTS", 100)
    one = Followed(max_pages=10)
    with pytest.raises(TransferError, match="without an end"):
        for at in range(200):
            one.mirror.take(one.known, changes(start=at, end=at, num_added=0), [])
    assert at == 140


# ---- What is found at whom ----


class MirrorMachine(RuleBasedStateMachine):
    """A mirror beside a set of pages for every server."""

    @initialize(spread=st.integers(0, 1 << 63))
    def open(self, spread: int) -> None:
        self.factor = spread | 1
        self.now, self.digest = 0.0, NOTHING
        self.mirror = Mirror(
            10_000, 130, salt=1, digest=lambda: self.digest, clock=lambda: self.now
        )
        self.held: dict[int, set[int]] = {}
        self.avoided: dict[int, float] = {}

    def fingerprints(self, pages: list[int]) -> np.ndarray:
        return fingerprints(pages, self.factor)

    def keys(self, pages: list[int]) -> list[bytes]:
        return [int(page).to_bytes(8, "little") + bytes(24) for page in self.fingerprints(pages)]

    def peer(self, number: int) -> MirroredPeer:
        return self.mirror._peers[peer_of(number)[0]]

    @rule(number=peers, pages=pages_lists, is_whole=st.booleans())
    def join_or_begin_anew(self, number: int, pages: list[int], is_whole: bool) -> None:
        known = self.mirror.join(*peer_of(number)) or self.peer(number)
        known.is_live, known.digest = True, NOTHING
        self.mirror.unload(known)
        self.held[number] = set(pages) - {0}
        self.mirror.add_pages(known, self.fingerprints(pages))
        if is_whole:
            self.mirror.loaded(known)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        is_live=st.booleans(),
        erased=st.sampled_from([NOTHING, SOMETHING]),
        agreed=st.sampled_from([b"", b"", NOTHING, SOMETHING]),
    )
    def answer(self, data: st.DataObject, is_live: bool, erased: bytes, agreed: bytes) -> None:
        known = self.peer(data.draw(st.sampled_from(sorted(self.held))))
        known.is_live, known.digest, known.agreed_with = is_live, erased, agreed
        self.mirror.choose()

    @rule(digest=st.sampled_from([NOTHING, SOMETHING]))
    def erase(self, digest: bytes) -> None:
        self.digest = digest
        self.mirror.choose()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), added=pages_lists, removed=pages_lists)
    def change(self, data: st.DataObject, added: list[int], removed: list[int]) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        self.mirror.add_pages(self.peer(number), self.fingerprints(added))
        self.mirror.remove_pages(self.peer(number), self.fingerprints(removed))
        self.held[number] = (self.held[number] | set(added) - {0}) - set(removed)

    @precondition(lambda self: self.held)
    @rule(pages=pages_lists)
    def hide(self, pages: list[int]) -> None:
        self.mirror.hide_pages(self.keys(pages))
        for held in self.held.values():
            held -= set(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), seconds=st.sampled_from([1.0, 5.0]))
    def avoid(self, data: st.DataObject, seconds: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        self.mirror.avoid(peer_of(number)[1], seconds)
        self.avoided[number] = self.now + seconds

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[number]
        self.avoided.pop(number, None)
        self.mirror.drop(self.peer(number))

    @rule()
    def time_passes(self) -> None:
        self.now += 2.0
        self.mirror.choose()

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        self.mirror._grow(data.draw(st.integers(0, 20_000)))

    def is_usable(self, number: int) -> bool:
        known = self.peer(number)
        has_erased_the_same = self.digest in (known.digest, known.agreed_with)
        is_well = known.is_live and self.avoided.get(number, 0.0) <= self.now
        return is_well and known.is_loaded and has_erased_the_same

    @invariant()
    def finds_what_the_model_holds(self) -> None:
        if not hasattr(self, "mirror"):
            return
        self.mirror.check_integrity()
        everything = list(range(61))
        usable = {n: pages for n, pages in self.held.items() if self.is_usable(n)}
        for without in [], [0, 3]:
            addresses = [peer_of(number)[1] for number in without]
            found = self.mirror.find(self.keys(everything), addresses)
            for page, address in zip(everything, found, strict=True):
                holders = {number for number, pages in usable.items() if page in pages}
                holders = {peer_of(number)[1] for number in holders - set(without)}
                assert (address in holders) if address else not holders, (page, holders)
        assert self.mirror.num_peers == sum(self.peer(number).is_live for number in self.held)
        assert (self.mirror.num_usable, self.mirror.num_pages) == (
            len(usable),
            len(set().union(*self.held.values())),
        )


MirrorMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMirror = MirrorMachine.TestCase
