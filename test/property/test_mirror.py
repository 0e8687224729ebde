"""What is known of other servers against a model: any order of changes, and of reading them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_tiered.sharing import holdings
from sglang_tiered.sharing.holdings import Holdings
from sglang_tiered.sharing.mirror import Mirror, Peer

pages_lists = st.lists(st.integers(0, 60), max_size=30)
peers = st.integers(0, 5)


def peer_of(number: int) -> Peer:
    return Peer(f"{number:032x}", f"tcp://192.0.2.{number}:1")


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(pages_lists, st.integers(0, 3)), max_size=12),
    piece=st.integers(1, 7),
    log=st.integers(0, 40),
)
def test_reading_while_pages_change_ends_with_them_all(
    steps: list[tuple[list[int], int]], piece: int, log: int
) -> None:
    """A follower that reads at any time, and ever so slowly, ends with what is held."""
    now: list[set[int]] = [{1, 2, 3}]
    version = [1]

    def held(known: int) -> tuple[int, np.ndarray] | None:
        return None if known == version[0] else (version[0], np.array(sorted(now[0]), np.uint64))

    old = holdings.MAX_FINGERPRINTS, holdings._MIN_LOG
    holdings.MAX_FINGERPRINTS, holdings._MIN_LOG = piece, log
    try:
        source = Holdings(held)
        epoch, sequence, cursor, mirrored = 0, 0, 0, set[int]()

        def read() -> bool:
            nonlocal epoch, sequence, cursor, mirrored
            part = source.since(epoch, sequence, cursor)
            if part is None:
                return False
            if part.start == 0:
                epoch, sequence, mirrored = part.epoch, part.sequence, set()
            if part.start is None:
                sequence += 1
                assert sequence == part.sequence
                mirrored -= set(part.removed.tolist())
            else:
                cursor = None if part.end is None else part.end + 1
            mirrored |= set(part.added.tolist())
            assert len(part.added) + len(part.removed) <= piece
            return True

        for pages, num_reads in steps:
            now[0] = (now[0] ^ set(pages)) - {0}
            version[0] += 1
            source.look()
            for _ in range(num_reads):
                read()
        for _ in range(1000):
            if not read():
                break
        assert mirrored == (now[0] if source.sequence else set())
    finally:
        holdings.MAX_FINGERPRINTS, holdings._MIN_LOG = old


class MirrorMachine(RuleBasedStateMachine):
    """A mirror beside a set of pages for every server."""

    @initialize(spread=st.integers(0, 1 << 63))
    def open(self, spread: int) -> None:
        # Small page numbers as fingerprints anywhere, zero staying zero.
        self.factor = spread | 1
        self.now = 0.0
        self.mirror = Mirror(10_000, 130, salt=1, digest=lambda: bytes(16), clock=lambda: self.now)
        self.held: dict[int, set[int]] = {}
        self.avoided: dict[int, float] = {}

    def fingerprints(self, pages: list[int]) -> np.ndarray:
        return np.array([page * self.factor % (1 << 64) for page in pages], np.uint64)

    def keys(self, pages: list[int]) -> list[bytes]:
        return [int(page).to_bytes(8, "little") + bytes(24) for page in self.fingerprints(pages)]

    def peer(self, number: int) -> object:
        return self.mirror._peers[peer_of(number).server]

    @rule(number=peers, pages=pages_lists)
    def join_or_begin_anew(self, number: int, pages: list[int]) -> None:
        known = self.mirror.join(peer_of(number)) or self.peer(number)
        known.is_live, known.digest = True, bytes(16)  # type: ignore[attr-defined]
        self.mirror.unload(known)  # type: ignore[arg-type]
        self.held[number] = set(pages) - {0}
        self.mirror.add_pages(known, self.fingerprints(pages))  # type: ignore[arg-type]
        self.mirror.loaded(known)  # type: ignore[arg-type]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), added=pages_lists, removed=pages_lists)
    def change(self, data: st.DataObject, added: list[int], removed: list[int]) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        known = self.peer(number)
        self.mirror.add_pages(known, self.fingerprints(added))  # type: ignore[arg-type]
        self.mirror.remove_pages(known, self.fingerprints(removed))  # type: ignore[arg-type]
        self.held[number] = (self.held[number] | set(added) - {0}) - set(removed)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), pages=pages_lists)
    def lack(self, data: st.DataObject, pages: list[int]) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        self.mirror.lacks(peer_of(number).server, self.keys(pages))
        self.held[number] -= set(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), seconds=st.sampled_from([1.0, 5.0]))
    def avoid(self, data: st.DataObject, seconds: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        self.mirror.avoid(peer_of(number).server, seconds)
        self.avoided[number] = self.now + seconds

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[number]
        self.avoided.pop(number, None)
        self.mirror.drop(self.peer(number))  # type: ignore[arg-type]

    @rule()
    def time_passes(self) -> None:
        self.now += 2.0
        self.mirror.choose()

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        self.mirror._grow(data.draw(st.integers(0, 20_000)))

    @invariant()
    def finds_what_the_model_holds(self) -> None:
        if not hasattr(self, "mirror"):
            return
        self.mirror.check_integrity()
        everything = list(range(61))
        usable = {n: p for n, p in self.held.items() if self.avoided.get(n, 0.0) <= self.now}
        for page, peer in zip(everything, self.mirror.find(self.keys(everything)), strict=True):
            holders = {number for number, pages in usable.items() if page in pages}
            assert (int(peer.server, 16) in holders) if peer else not holders, (page, holders)


MirrorMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMirror = MirrorMachine.TestCase
