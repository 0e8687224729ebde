"""The locality index against a model: any bytes into the parsers, any order of changes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_tiered.sharing.locality import formats
from sglang_tiered.sharing.locality.formats import DELTA_PAGES, PIECE_PAGES, ServerRecord
from sglang_tiered.sharing.locality.mirror import Mirror

NAMESPACE = bytes(32)
SERVER = "ab" * 16
MAGICS = [b"SGLTPEER", b"SGLTPGES", b"SGLTDLTA", b"SGLTPURG"]

# Bytes that verify, with anything in them: what a forger writes, not what a flipped bit leaves.
sealed = st.builds(
    lambda magic, version, rest: formats._seal(magic + version.to_bytes(4, "little") + rest),
    st.sampled_from(MAGICS),
    st.sampled_from([0, 1, 1, 1, 2]),
    st.binary(max_size=400),
)
# Of our server, so that the fields behind are looked at too.
addressed = st.builds(
    lambda magic, rest: formats._seal(
        magic + bytes([1, 0, 0, 0]) + bytes(4) + bytes.fromhex(SERVER) + rest
    ),
    st.sampled_from([b"SGLTPGES", b"SGLTDLTA"]),
    st.binary(min_size=16, max_size=200),
)


@settings(max_examples=400, deadline=None)
@given(data=st.one_of(st.binary(max_size=500), sealed, addressed, st.none()))
def test_any_bytes_parse_within_bounds_or_fail(data: bytes | None) -> None:
    record = formats.unpack_record(data, NAMESPACE, SERVER)
    assert record is None or (
        formats.is_address(record.address) and 0 < record.snapshot <= record.sequence
    )
    size = len(data or b"")
    piece = formats.unpack_piece(data, SERVER, 0, 0)
    assert piece is None or (len(piece) <= PIECE_PAGES and piece.nbytes <= size)
    delta = formats.unpack_delta(data, SERVER, 0)
    assert delta is None or sum(map(len, delta)) <= min(DELTA_PAGES, size // 8)
    if data is not None:
        purge = formats.unpack_purge(data)
        assert purge is None or len(purge.number) == 16


pages_lists = st.lists(st.integers(0, 60), max_size=30)
peers = st.integers(0, 5)


def record_of(number: int, incarnation: int = 1) -> ServerRecord:
    name, address = f"{number:032x}", f"tcp://192.0.2.{number}:1"
    return ServerRecord(NAMESPACE, name, incarnation, 1, 1, 0, bytes(16), address)


class MirrorMachine(RuleBasedStateMachine):
    """A mirror beside a set of pages for every server."""

    @initialize(spread=st.integers(0, 1 << 63))
    def open(self, spread: int) -> None:
        # Small page numbers as fingerprints anywhere, zero staying zero.
        self.factor = spread | 1
        self.now = 0.0
        self.mirror = Mirror(10_000, 130, salt=1, digest=lambda: bytes(16), clock=lambda: self.now)
        self.held: dict[int, set[int]] = {}
        self.incarnations: dict[int, int] = {}
        self.avoided: dict[int, float] = {}

    def fingerprints(self, pages: list[int]) -> np.ndarray:
        return np.array([page * self.factor % (1 << 64) for page in pages], np.uint64)

    def keys(self, pages: list[int]) -> list[bytes]:
        return [int(page).to_bytes(8, "little") + bytes(24) for page in self.fingerprints(pages)]

    def see(self) -> None:
        self.mirror.update(
            [record_of(number, self.incarnations[number]) for number in self.held], self.now + 9.0
        )

    def peer(self, number: int) -> object:
        name = record_of(number).server
        return next(known for known in self.mirror.peers if known.record.server == name)

    @rule(number=peers, pages=pages_lists)
    def join_or_begin_anew(self, number: int, pages: list[int]) -> None:
        self.incarnations[number] = self.incarnations.get(number, 0) + 1
        self.held[number] = set(pages) - {0}
        self.see()
        known = self.peer(number)
        self.mirror.add_pages(known, self.fingerprints(pages))  # type: ignore[arg-type]
        self.mirror.loaded(known, 1)  # type: ignore[arg-type]

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
        self.mirror.lacks(record_of(number).server, self.keys(pages))
        self.held[number] -= set(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), seconds=st.sampled_from([1.0, 5.0]))
    def avoid(self, data: st.DataObject, seconds: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        self.mirror.avoid(record_of(number).server, seconds)
        self.avoided[number] = self.now + seconds

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[number]
        self.avoided.pop(number, None)
        self.see()

    @rule()
    def time_passes(self) -> None:
        self.now += 2.0
        self.see()

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
