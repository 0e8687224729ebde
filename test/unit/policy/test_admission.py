"""What is admitted at which pressure, and that the write budget holds over every window."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.clock import Clock
from sglang_tiered.budgets import DAY_S, DailyBudget
from sglang_tiered.policy import admission
from sglang_tiered.policy.admission import (
    LONG_PREFIX_TOKENS,
    Admission,
    Level,
    Outcome,
    TouchMemory,
    backlog_pressure,
)

BUSY, EXHAUSTED = 0.5, 1.0  # pressures at which SELECTIVE and CLOSED begin
PAGE_BYTES = 1000
DAY_BYTES = 1_000_000  # a burst of 100,000


def keys(*names: object) -> list[bytes]:
    return [hashlib.sha256(str(name).encode()).digest() for name in names]


def offer(
    admission: Admission,
    pages: Sequence[bytes],
    *,
    prefix_tokens: int = 100,
    num_held: int = 0,
    backlog: float | None = None,
) -> int:
    return admission.decide(
        pages,
        prefix_tokens=prefix_tokens,
        page_bytes=PAGE_BYTES,
        num_held=lambda: num_held,
        backlog=backlog,
    )


# ---- Write budget ----


def test_budget_is_paid_back_and_never_piles_up() -> None:
    clock = Clock()
    budget = DailyBudget(DAY_BYTES, clock)
    budget.spend(DAY_BYTES // 10 + 9000)
    assert budget.available == -9000
    assert budget.pressure > 1
    clock.now = DAY_S / 100  # 9,000 bytes flow in
    assert budget.available == pytest.approx(0)
    clock.now = 30 * DAY_S
    assert budget.available == DAY_BYTES / 10 and budget.pressure == 0


# ---- Touch memory ----


def test_page_is_seen_the_second_time() -> None:
    memory = TouchMemory(1 << 12)
    seen = [memory.num_seen(keys(*run)) for run in ("abc", "abcd", "abcd", "", "h", "efghi")]
    assert seen == [0, 3, 4, 0, 0, 4], "a seen page vouches for forgotten ones before it"
    assert memory.num_seen([bytes(32)]) == 0, "zeros are no empty slot"


@given(st.integers(1, 64), st.lists(st.lists(st.integers(0, 200), max_size=20, unique=True)))
def test_new_page_is_never_taken_for_seen(num_slots: int, runs: list[list[int]]) -> None:
    """Overwritten slots forget; they must not lie, however full the table is."""
    memory = TouchMemory(num_slots)
    offered: set[int] = set()
    for run in runs:
        seen = memory.num_seen(keys(*run))
        assert seen == 0 or run[seen - 1] in offered
        offered.update(run)


def test_memory_forgets_instead_of_growing() -> None:
    memory = TouchMemory(64)
    memory.num_seen(keys("old"))
    for number in range(2000):
        memory.num_seen(keys(number))
    assert memory.num_seen(keys("old")) == 0
    assert memory._table.nbytes == 64 * 8


# ---- Levels ----


SHORT, LONG = LONG_PREFIX_TOKENS - 1, LONG_PREFIX_TOKENS
TOUCHED, BACKLOG = Outcome.DROPPED_FIRST_TOUCH, Outcome.DROPPED_BACKLOG


@pytest.mark.parametrize(
    ("offers", "dropped"),
    [
        pytest.param([("abcdefghij", 0.0, 10)], {}, id="idle disk takes everything"),
        pytest.param([("abc", BUSY, 0), ("abc", None, 3)], {TOUCHED: 3}, id="busy: second touch"),
        pytest.param([("a", 0.0, 1), ("ab", BUSY, 1)], {TOUCHED: 1}, id="earlier touches count"),
        pytest.param([("ab", BUSY, 0), ("abcd", None, 2)], {TOUCHED: 4}, id="behind the last seen"),
        pytest.param(
            [("ab", BUSY, 0, SHORT), ("cd", None, 2, LONG)], {TOUCHED: 2}, id="long ones whole"
        ),
        pytest.param([("a", 0.0, 1), ("a", 1.0, 0, 1 << 30)], {BACKLOG: 1}, id="exhausted: none"),
        pytest.param([("a", 1.0, 0), ("a", None, 0)], {BACKLOG: 2}, id="unknown leaves the last"),
    ],
)
def test_pressure_decides_what_is_taken(
    offers: list[tuple[Any, ...]], dropped: dict[Outcome, int]
) -> None:
    gate = Admission()
    for names, backlog, admitted, *length in offers:
        prefix_tokens = length[0] if length else 100
        assert offer(gate, keys(*names), prefix_tokens=prefix_tokens, backlog=backlog) == admitted
    taken = {Outcome.ADMITTED: sum(one[2] for one in offers)}
    assert {one: count for one, count in gate.outcomes.items() if count} == {
        **{one: count for one, count in taken.items() if count},
        **dropped,
    }


@pytest.mark.parametrize("backlog", [0.0, BUSY, EXHAUSTED])
def test_page_that_is_held_already_is_never_dropped(backlog: float) -> None:
    """It costs nothing, and a False for it would keep SGLang from offering what follows."""
    gate = Admission()
    assert offer(gate, keys(*"abc"), num_held=2, backlog=backlog) >= 2


def test_levels_do_not_flap_at_a_threshold() -> None:
    gate = Admission()
    seen = []
    for pressure in (0.49, 0.5, 0.4, 0.26, 0.24, 0.4, 0.6, 1.0, 0.9, 0.88, 0.87, 0.9, 0.1):
        offer(gate, keys("a"), backlog=pressure)
        seen.append(gate.level)
    o, s, c = Level.OPEN, Level.SELECTIVE, Level.CLOSED
    assert seen == [o, s, s, s, o, o, s, c, c, c, s, s, o]


@pytest.mark.parametrize(
    ("waited_s", "pinned_share", "level"),
    [
        (0.0, 1.0, Level.OPEN),  # a burst fills the host tier: the disk may still be idle
        (0.4, 1.0, Level.OPEN),
        (1.0, 1.0, Level.SELECTIVE),  # it stays filled
        (2.0, 1.0, Level.CLOSED),
        (1.9, 0.1, Level.OPEN),
        (2.0, 0.0, Level.SELECTIVE),
        (4.0, 0.0, Level.CLOSED),
    ],
)
def test_backlog_counts_by_its_waiting_time(
    waited_s: float, pinned_share: float, level: Level
) -> None:
    gate = Admission()
    offer(gate, keys("a"), backlog=backlog_pressure(waited_s, pinned_share))
    assert gate.level is level


# ---- Budget and levels together ----


def budgeted() -> tuple[Admission, Clock]:
    clock = Clock()
    return Admission(budget=DailyBudget(DAY_BYTES, clock)), clock


def test_operation_larger_than_the_budget_keeps_its_head() -> None:
    gate, _ = budgeted()
    admitted = offer(gate, keys(*range(500)), num_held=10)
    assert admitted == 10 + int(100_000 / (PAGE_BYTES * admission.MAX_WRITTEN_PER_PAYLOAD))
    assert gate.outcomes[Outcome.DROPPED_BUDGET] == 500 - admitted
    assert gate.level is Level.CLOSED


def test_used_up_budget_opens_again_by_waiting_only() -> None:
    gate, clock = budgeted()
    gate.spend(100_000)
    assert offer(gate, keys("a")) == 0
    clock.now = 0.1 * DAY_S / 9  # a tenth of the burst: not enough to open
    assert offer(gate, keys("a")) == 0
    clock.now = 0.2 * DAY_S / 9
    assert offer(gate, keys("a")) == 1  # seen twice by now
    clock.now = DAY_S
    assert offer(gate, keys("new")) == 1


@given(
    st.lists(
        st.tuples(st.floats(0, 3600), st.integers(1, 60), st.floats(0, 1.2), st.integers(0, 9999)),
        min_size=1,
        max_size=80,
    )
)
def test_admitted_bytes_never_exceed_the_budget(steps: list[tuple[float, int, float, int]]) -> None:
    gate, clock = budgeted()
    writes: list[tuple[float, float]] = []
    for number, (wait_s, num_pages, backlog, prefix_tokens) in enumerate(steps):
        clock.now += wait_s
        pages = keys(*((number // 2, page) for page in range(num_pages)))
        admitted = offer(gate, pages, prefix_tokens=prefix_tokens, backlog=backlog)
        assert 0 <= admitted <= num_pages
        written = int(admitted * PAGE_BYTES * admission.MAX_WRITTEN_PER_PAYLOAD)
        gate.spend(written)
        writes.append((clock.now, written))
    assert sum(gate.outcomes.values()) == sum(num_pages for _, num_pages, _, _ in steps)
    for start, _ in writes:
        assert sum(size for at, size in writes if start <= at <= start + DAY_S) <= DAY_BYTES + 1
