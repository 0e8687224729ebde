"""A plan covers every query and every key once, for any batch. No kernel runs here."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pod_cases import SMALL, shape_of

from sglang_tiered_kernels.pod_attention import PodConfig, PodPlan, is_decode_row, make_plan
from sglang_tiered_kernels.pod_attention import plan as plan_module

ROWS = st.lists(
    st.tuples(
        st.one_of(st.just(1), st.integers(0, 3), st.integers(0, 400)),
        st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 3000)),
    ),
    max_size=12,
)
CONFIGS = st.builds(
    PodConfig,
    name=st.just("any"),
    block_m=st.sampled_from([16, 64, 128]),
    block_n=st.sampled_from([16, 64]),
    block_n_decode=st.sampled_from([32, 64]),
    split_len=st.sampled_from([0, 64, 256]),
)
WINDOWS = st.one_of(st.just(-1), st.integers(0, 600))


def plan_of(rows: list[tuple[int, int]], **options: object) -> PodPlan:
    options = {"num_sms": 132, "config": SMALL, **options}
    return make_plan(
        [extend for extend, _ in rows],
        [prefix for _, prefix in rows],
        shape_of(heads=(8, 2)),
        **options,  # type: ignore[arg-type]
    )


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, config=CONFIGS, window=WINDOWS)
def test_every_query_and_key_is_in_one_unit(
    rows: list[tuple[int, int]], config: PodConfig, window: int
) -> None:
    plan = plan_of(rows, config=config, window=window)
    seen = np.zeros(plan.num_tokens, dtype=int)
    position = np.full(plan.num_tokens, -1)
    owner = np.full(plan.num_tokens, -1)
    for row, first, count, begin in plan.prefill_units.tolist():
        assert 1 <= count <= config.block_m
        seen[first : first + count] += 1
        position[first : first + count] = range(begin, begin + count)
        owner[first : first + count] = row
    for row, query, _, kv_end, _ in plan.decode_units.tolist():
        seen[query] = 1
        position[query] = max(position[query], kv_end - 1)
        owner[query] = row
    assert seen.tolist() == [1] * plan.num_tokens
    expected = [(i, prefix + j) for i, (extend, prefix) in enumerate(rows) for j in range(extend)]
    assert list(zip(owner.tolist(), position.tolist(), strict=True)) == expected
    prefilled = set(plan.prefill_units[:, 0].tolist())
    decoded = set(plan.decode_units[:, 0].tolist())
    assert decoded == {i for i, row in enumerate(rows) if is_decode_row(*row)}
    assert prefilled == {i for i, row in enumerate(rows) if row[0] and not is_decode_row(*row)}
    partials: dict[int, list[int]] = {}
    for row, (extend, prefix) in enumerate(rows):
        units = plan.decode_units[plan.decode_units[:, 0] == row]
        if not is_decode_row(extend, prefix):
            assert not len(units)
            continue
        units = units[units[:, 2].argsort()]
        begins, ends = units[:, 2].tolist(), units[:, 3].tolist()
        assert begins[0] == (max(0, prefix - window) if window >= 0 else 0)
        assert ends[-1] == prefix + 1
        assert begins[1:] == ends[:-1], "a key is missing or counted twice"
        assert all(begin % config.block_n_decode == 0 for begin in begins[1:])
        assert (units[:, 3] - units[:, 2]).max() <= plan.split_len
        if len(units) == 1:
            assert units[0, 4] == -1
        else:
            partials[units[0, 1]] = units[:, 4].tolist()
    merged = {query: list(range(first, first + n)) for query, first, n in plan.merges.tolist()}
    assert partials == merged
    places = sorted(place for own in merged.values() for place in own)
    assert places == list(range(plan.num_partials))


def test_each_launch_has_counters_of_its_own() -> None:
    """Zero, aligned, and of no launch in flight."""
    plan = plan_of([(20, 5), (1, 90)])
    num_launches = plan_module._LAUNCHES_PER_CLEARING
    starts = set()
    for _ in range(3 * num_launches):
        counters = plan.counters()
        assert not counters.any()
        assert counters.data_ptr() % 16 == 0
        starts.add(counters.data_ptr())
        counters.fill_(7)
    assert len(starts) == num_launches
