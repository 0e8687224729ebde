"""Where the front of a prefix meets its back, by prices."""

from __future__ import annotations

import pytest

from sglang_tiered.policy.both_ends import (
    BackLeft,
    computes_next,
    end_of_chunk,
    parts_of,
    plan_segments,
    segment_bounds,
    spans_between,
)
from sglang_tiered.policy.cost_model import CostModel, PrefillCost, TransferCost

PAGE, TOKEN_BYTES = 64, 1000
TOKEN_S = 1e-4  # of prefill
HELD = 8192


def costs(load_over_prefill: float) -> CostModel:
    return CostModel(
        page_tokens=PAGE,
        bytes_per_token=TOKEN_BYTES,
        prefill=PrefillCost((1e-3, TOKEN_S, 0.0, 0.0)),
        transfers=[TransferCost((1e-4, load_over_prefill * TOKEN_S / TOKEN_BYTES))],
    )


def planned(
    ratio: float, *, num_held: int = HELD, num_new: int = HELD + 96, num_others: int = 0
) -> list[int] | None:
    model = costs(ratio)
    plan = model.plan(num_held=num_held, num_new=num_new, num_before=0, num_others=num_others)
    found = plan_segments(
        model,
        num_held=num_held,
        num_new=num_new,
        num_before=0,
        spans=[],
        least=plan,
        num_others=num_others,
    )
    if found is None:
        return None
    bounds, load = found
    assert load.num_tokens == bounds[-1] - bounds[0]
    return bounds


def back_of(bounds: list[int]) -> BackLeft:
    """Nothing of it has arrived."""
    starts = bounds[:-1]
    return BackLeft(
        starts, bounds[-1], [[end - start] for start, end in zip(starts, bounds[1:], strict=True)]
    )


def test_segments_cover_all_in_whole_pages() -> None:
    bounds = segment_bounds(640, HELD, PAGE)
    assert (bounds[0], bounds[-1]) == (640 + HELD // 16, 640 + HELD)
    assert all((bound - 640) % PAGE == 0 for bound in bounds)
    assert len(bounds) <= 16


@pytest.mark.parametrize(
    ("ratio", "more", "begins"),
    [
        (0.25, {}, True),
        (0.001, {}, False),
        (100.0, {}, False),
        (1.0, {"num_held": 256, "num_new": 300}, False),
        # A slow load gains even so, since computing all would hold up the others longer.
        (0.57, {"num_others": 1}, False),
        (2.0, {"num_others": 1}, True),
        (2.0, {"num_others": 3}, True),
        (0.25, {"num_others": 3}, False),
    ],
)
def test_both_ends_begin_where_one_is_slower(
    ratio: float, more: dict[str, int], begins: bool
) -> None:
    assert (planned(ratio, **more) is not None) == begins


@pytest.mark.parametrize("ratio", [0.57, 1.0, 2.0])
def test_first_chunk_ends_where_the_back_arrives(ratio: float) -> None:
    """``P * L / (P + L)`` of the prefill, to a segment."""
    model, bounds = costs(ratio), planned(ratio)
    assert bounds is not None and bounds[-1] == HELD
    end = end_of_chunk(model, back_of(bounds), 0)
    assert end is not None
    assert end == pytest.approx(HELD * ratio / (1 + ratio), abs=HELD / 16 + PAGE)
    assert end_of_chunk(model, BackLeft([], HELD, []), HELD) is None, "nothing is left"


MUCH = back_of([4096, 5120, 6144, 7168, 8192])
LAST = BackLeft([4096, 5120], 6144, [[100], [0]])


@pytest.mark.parametrize(
    ("back", "num_others", "late_s", "computes"),
    [
        pytest.param(MUCH, 0, 0.0, True, id="while much comes"),
        pytest.param(LAST, 0, 0.0, False, id="last segment is waited for"),
        pytest.param(LAST, 0, 1.0, True, id="stalled segment in the end"),
        pytest.param(MUCH, 2, 0.0, False, id="not where it holds up others"),
    ],
)
def test_next_segment_is_computed_or_waited_for(
    back: BackLeft, num_others: int, late_s: float, computes: bool
) -> None:
    computed = computes_next(costs(1.0), back, 4096, num_others=num_others, late_s=late_s)
    assert computed is computes


def test_spans_are_cut_at_segments() -> None:
    spans = [(0, 100), (2, 50)]
    assert spans_between(spans, 80, 120) == [(0, 20), (2, 20)]
    assert parts_of(spans_between(spans, 80, 120), 3) == [20, 0, 20]


@pytest.mark.parametrize("num_others", [0, 64, 1000])
def test_nobody_waits_for_ever_for_others(num_others: int) -> None:
    """A hung disk, and prefills that would hold up many: its own wait has a bound."""
    bounds = planned(1.0)
    assert bounds is not None
    back = back_of(bounds)
    rest_s = HELD * TOKEN_S
    assert computes_next(costs(1.0), back, bounds[0], num_others=num_others, late_s=1.3 * rest_s)
