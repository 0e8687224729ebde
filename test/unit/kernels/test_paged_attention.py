"""The paged attention reference against a float64 loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tiered_kernels import paged_attention
from sglang_tiered_kernels.paged_attention import decode, extend, plan_decode

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass
class Case:
    """Sequences scattered over a cache whose every other slot holds NaN."""

    query: torch.Tensor  # [tokens, query_heads, qk_dim]
    keys: torch.Tensor  # [slots, kv_heads, qk_dim]
    values: torch.Tensor  # [slots, kv_heads, v_dim]
    rows: list[torch.Tensor]
    query_lens: list[int]


def make_case(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """lengths: (keys, queries) per sequence."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(keys for keys, _ in lengths)
    slots = torch.randperm(2 * total + 8, generator=generator)
    rows = list(slots[:total].split([keys for keys, _ in lengths]))

    def cache(dim: int) -> torch.Tensor:
        filled = torch.full((len(slots), heads[1], dim), math.nan, dtype=dtype)
        live = torch.randn(total, heads[1], dim, generator=generator)
        filled[slots[:total]] = live.to(dtype)
        return filled

    tokens = sum(queries for _, queries in lengths)
    query = torch.randn(tokens, heads[0], dims[0], generator=generator).to(dtype)
    return Case(query, cache(dims[0]), cache(dims[1]), rows, [q for _, q in lengths])


def oracle(
    case: Case,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sequence by sequence, head by head, the whole matrix of scores in float64."""
    heads, kv_heads = case.query.shape[1], case.keys.shape[1]
    out = torch.zeros(*case.query.shape[:2], case.values.shape[2], dtype=torch.float64)
    begin = 0
    for rows, count in zip(case.rows, case.query_lens, strict=True):
        end = begin + count
        position = torch.arange(len(rows) - count, len(rows))[:, None]
        behind = torch.arange(len(rows)) - position
        hidden = (behind > 0) if causal else torch.zeros_like(behind, dtype=torch.bool)
        if sliding_window is not None:
            hidden = hidden | (behind.abs() > sliding_window)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            keys, values = case.keys[rows, kv_head].double(), case.values[rows, kv_head].double()
            # A row hidden from every query may hold NaN, which a weight of zero would not remove.
            values = values.masked_fill(hidden.all(dim=0)[:, None], 0)
            scores = case.query[begin:end, head].double() @ keys.T * scale
            if logit_cap:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            weights = torch.exp(scores).masked_fill(hidden, 0)
            total = weights.sum(dim=1, keepdim=True)
            if sinks is not None:
                total = total + torch.exp(sinks[head].double())
            if len(rows):
                out[begin:end, head] = weights @ values / total
        begin = end
    return out


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    # Tensors this small lose to the hand-over between threads, most of all on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_extend(case: Case, **options: object) -> torch.Tensor:
    return extend(case.query, case.keys, case.values, case.rows, case.query_lens, **options)  # type: ignore[arg-type]


def run_decode(case: Case, *, sliding_window: int | None = None, **options: object) -> torch.Tensor:
    plan = plan_decode(case.rows, sliding_window=sliding_window)
    return decode(case.query, case.keys, case.values, plan, **options)  # type: ignore[arg-type]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


SINKS = torch.tensor([-3.0, 0.0, 0.5, 1.0, 2.0, 6.0])
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 37},
    "window of the token itself": {"sliding_window": 0},
    "cap": {"logit_cap": 3.0},
    "sinks": {"sinks": SINKS},
    "all": {"sliding_window": 20, "logit_cap": 2.0, "sinks": SINKS},
}
LENGTHS = [1, 63, 64, 127, 300]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_extend_with_or_without_prefix_matches_the_oracle(options: dict[str, object]) -> None:
    lengths = [(n, n) for n in LENGTHS] + [(n + 28, 28) for n in LENGTHS] + [(64, 1), (9, 0)]
    case = make_case(lengths)
    assert_close(run_extend(case, scale=0.25, **options), oracle(case, scale=0.25, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_decode_matches_the_oracle_at_mixed_lengths(options: dict[str, object]) -> None:
    case = make_case([(n, 1) for n in [1472, *LENGTHS, 1500, 2]])
    assert_close(run_decode(case, scale=0.25, **options), oracle(case, scale=0.25, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("capped", [0.0, 20.0], ids=["fused", "explicit"])
def test_a_long_prefix_keeps_its_precision(dtype: torch.dtype, capped: float) -> None:
    case = make_case([(1500, 28)], heads=(3, 1), dims=(64, 64), dtype=dtype)
    expected = oracle(case, scale=0.125, logit_cap=capped)
    actual = run_extend(case, scale=0.125, logit_cap=capped)
    assert actual.dtype == dtype
    assert_close(actual, expected)


def test_an_fp8_cache_is_read_in_query_dtype() -> None:
    case = make_case([(50, 20), (9, 9)])
    case.keys = case.keys.to(torch.float8_e4m3fn)
    case.values = case.values.to(torch.float8_e4m3fn)
    assert_close(run_extend(case, scale=0.25), oracle(case, scale=0.25))
    step = Case(case.query[:2], case.keys, case.values, case.rows, [1, 1])
    assert_close(run_decode(step, scale=0.25), oracle(step, scale=0.25))


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_an_encoder_sees_both_sides(sliding_window: int | None) -> None:
    case = make_case([(40, 40), (1, 1)])
    options = {"scale": 0.25, "causal": False, "sliding_window": sliding_window}
    assert_close(run_extend(case, **options), oracle(case, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("capped", [0.0, 5.0], ids=["fused", "explicit"])
def test_cross_attention_allows_few_keys_or_none(capped: float) -> None:
    case = make_case([(5, 30), (0, 4), (50, 3)])
    actual = run_extend(case, scale=0.25, causal=False, logit_cap=capped)
    assert_close(actual, oracle(case, scale=0.25, causal=False, logit_cap=capped))
    assert not actual[30:34].any(), "a request without encoder tokens is zeros, not NaN"


def test_slots_behind_every_window_are_not_read() -> None:
    options = {"scale": 0.25, "sliding_window": 10}
    case = make_case([(100, 20)])
    clean = run_extend(case, **options)
    # The first query sits at 80 and sees 70; a pool may have given slots 0..69 away.
    case.keys[case.rows[0][:70]] = math.nan
    case.values[case.rows[0][:70]] = math.nan
    assert torch.equal(run_extend(case, **options), clean)
    step = Case(case.query[-1:], case.keys, case.values, case.rows, [1])
    assert_close(run_decode(step, **options), oracle(step, **options))  # type: ignore[arg-type]


def test_padding_after_the_last_sequence_is_zeros() -> None:
    case = make_case([(10, 10)])
    case.query = torch.cat([case.query, torch.full_like(case.query[:3], math.nan)])
    actual = run_extend(case, scale=0.25)
    assert actual.shape[0] == 13
    assert not actual[10:].any()


def test_block_edges_do_not_move_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(100, 90), (33, 33)])
    options = {"scale": 0.25, "sliding_window": 13, "logit_cap": 4.0}
    expected = oracle(case, **options)  # type: ignore[arg-type]
    for block in (1, 32, 89, 90, 91):
        monkeypatch.setattr(paged_attention, "_QUERY_BLOCK", block)
        assert_close(run_extend(case, **options), expected)
    # A budget below one query's scores still makes progress, a query at a time.
    monkeypatch.setattr(paged_attention, "_SCORE_BUDGET", 1)
    assert_close(run_extend(case, **options), expected)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 24)), max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dims=st.tuples(st.sampled_from([4, 8]), st.sampled_from([4, 8])),
    window=st.none() | st.integers(0, 30),
    cap=st.sampled_from([0.0, 1.5]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_ragged_batch_matches_the_oracle(
    lengths: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    window: int | None,
    cap: float,
    with_sinks: bool,
    seed: int,
) -> None:
    heads = (kv_heads * group, kv_heads)
    sinks = torch.linspace(-2, 2, heads[0]) if with_sinks else None
    options = {"scale": 0.4, "sliding_window": window, "logit_cap": cap, "sinks": sinks}
    ragged = [(prefix + queries, queries) for prefix, queries in lengths]
    case = make_case(ragged, heads=heads, dims=dims, seed=seed)
    assert_close(run_extend(case, **options), oracle(case, **options))  # type: ignore[arg-type]
    step = make_case([(keys, 1) for keys, _ in ragged], heads=heads, dims=dims, seed=seed)
    assert_close(run_decode(step, **options), oracle(step, **options))  # type: ignore[arg-type]
