"""The rule by which servers share NVMe, over any members, and over servers that live by it."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tiered.policy.shares import StoreShare, grant, recall

TOTAL = 1000
STEP = 16
SIZES = st.integers(0, TOTAL)


@st.composite
def members(draw: st.DrawFn) -> dict[str, StoreShare]:
    """Of floors that fit, and of capacities that do; some are below their floor."""
    found: dict[str, StoreShare] = {}
    floors = caps = TOTAL
    for number in range(draw(st.integers(1, 5))):
        floor, cap = draw(st.integers(0, floors)), draw(st.integers(0, caps))
        floors, caps = floors - floor, caps - cap
        found[str(number)] = StoreShare(
            floor,
            cap,
            draw(st.one_of(st.just(cap), SIZES)),
            draw(st.integers(0, cap)),
            draw(st.integers(0, cap)),
            draw(st.one_of(st.just(0), SIZES)),
            draw(st.one_of(st.just(math.inf), st.floats(0, 1e6))),
            draw(st.booleans()),
        )
    return found


@given(members())
def test_never_above_the_total_nor_below_floors(found: dict[str, StoreShare]) -> None:
    for name, mine in found.items():
        given_bytes = grant(TOTAL, found, name)
        assert given_bytes >= 0
        if given_bytes:
            others = sum(m.reserved_bytes for other, m in found.items() if other != name)
            assert mine.cap_bytes + given_bytes + others <= TOTAL
        for other, due in recall(TOTAL, found, name).items():
            lender = found[other]
            assert other != name
            assert max(lender.floor_bytes, lender.keeps_bytes) <= due < lender.cap_bytes


class Cache:
    """A server that goes through so many bytes again and again, at a rate: a cycle of a log."""

    def __init__(self, rate: float, working_set: float) -> None:
        self.rate, self.working_set = rate, working_set
        self.idle_s = 0.0

    def member(self, floor: int, cap: int, due: int) -> StoreShare:
        is_short = bool(self.rate) and cap < self.working_set
        cycle_s = min(cap, self.working_set) / self.rate if self.rate else math.inf
        coldest = cycle_s if self.rate else self.idle_s
        held = min(cap, int(self.working_set))
        return StoreShare(floor, cap, due, held, 0, STEP if is_short else 0, coldest)


def live(
    caches: dict[str, Cache], caps: dict[str, int], floor: int, ticks: int, total: int = TOTAL
) -> tuple[dict[str, int], int]:
    """Return capacities after so many ticks, and the bytes that moved. Each acts in its turn."""
    dues = dict(caps)
    moved = 0
    for _ in range(ticks):
        for name, cache in caches.items():
            cache.idle_s += 1.0
            if dues[name] < caps[name]:
                moved += caps[name] - dues[name]
                caps[name] = dues[name]
            found = {n: c.member(floor, caps[n], dues[n]) for n, c in caches.items()}
            taken = grant(total, found, name)
            if taken:
                caps[name] += taken
                dues[name] = caps[name]
                found[name] = found[name]._replace(cap_bytes=caps[name], due_bytes=caps[name])
            dues.update(recall(total, found, name))
            assert sum(caps.values()) <= total
            assert all(dues[n] >= min(floor, caps[n]) for n in caps)
    return caps, moved


@settings(max_examples=50)
@given(st.floats(0.5, 50), st.floats(0.5, 50), st.integers(100, 900))
def test_two_busy_servers_come_to_rest(one: float, other: float, start: int) -> None:
    caches = {"a": Cache(one, 5000), "b": Cache(other, 5000)}
    caps, _ = live(caches, {"a": start, "b": TOTAL - start}, 100, 200)
    caps, moved = live(caches, caps, 100, 200)
    assert moved == 0, f"they trade: {caps}"
    assert min(caps.values()) >= 100


@settings(max_examples=50)
@given(st.integers(2, 4), st.integers(100, 800))
def test_the_busy_one_gets_what_others_leave(number: int, want: int) -> None:
    floor = 50
    caches = {str(n): Cache(0.0, 5000) for n in range(number)}
    caps = dict.fromkeys(caches, TOTAL // number)
    for busy in caches:
        for name, cache in caches.items():
            cache.rate, cache.idle_s = (20.0, 0.0) if name == busy else (0.0, cache.idle_s)
            cache.working_set = want
        caps, _ = live(caches, caps, floor, 300)
        assert caps[busy] >= min(want, TOTAL - floor * (number - 1)), (busy, caps)
