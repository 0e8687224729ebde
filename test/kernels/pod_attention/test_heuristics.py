"""Choices made on the host: the gate, tickets, splits and configurations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered_kernels.pod_attention import (
    CONFIGS,
    PodConfig,
    PodPlan,
    PodShape,
    Schedule,
    make_plan,
)
from sglang_tiered_kernels.pod_attention.heuristics import (
    choose_config,
    choose_schedule,
    choose_split_len,
)

LLAMA = PodShape(32, 8, 128, 64, torch.bfloat16, torch.bfloat16)


def mixed(chunk: int, decodes: int, context: int, **options: object) -> PodPlan:
    extend, prefix = [1] * decodes, [context - 1] * decodes
    if chunk:
        extend, prefix = [chunk, *extend], [context - chunk, *prefix]
    return make_plan(extend, prefix, LLAMA, num_sms=132, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chunk", "decodes", "context"),
    [(0, 64, 8192), (2048, 0, 8192), (8192, 1, 8192), (16, 256, 8192)],
    ids=["no prefill", "no decode", "one beside a large chunk", "a tail beside many"],
)
def test_a_small_role_is_not_worth_fusing(chunk: int, decodes: int, context: int) -> None:
    assert not mixed(chunk, decodes, context).fuse


def test_estimates_grow_with_the_work() -> None:
    small, large = mixed(1024, 32, 4096), mixed(2048, 64, 8192)
    assert large.fuse, "both roles are large"
    assert large.prefill_estimate_s > 2 * small.prefill_estimate_s > 0
    assert large.decode_estimate_s > 2 * small.decode_estimate_s > 0


def test_a_window_costs_only_its_keys() -> None:
    whole, window = mixed(2048, 64, 8192), mixed(2048, 64, 8192, window=512)
    assert window.prefill_estimate_s < whole.prefill_estimate_s / 3
    assert window.decode_estimate_s < whole.decode_estimate_s / 3


@given(
    chunk=st.integers(2, 4096),
    decodes=st.integers(1, 64),
    context=st.integers(4096, 20_000),
)
def test_tickets_are_coprime_and_few(chunk: int, decodes: int, context: int) -> None:
    prefill, decode = mixed(chunk, decodes, context).tickets
    assert math.gcd(prefill, decode) == 1
    assert 1 <= prefill <= 64 and 1 <= decode <= 64


def test_tickets_follow_the_counts_of_tiles() -> None:
    # 32 blocks of 64 queries by 32 heads, and 64 rows in 4 splits by 8 heads: 1024 to 2048.
    proportional = mixed(2048, 64, 8192, config=PodConfig("p", split_len=2048))
    assert proportional.num_prefill_tiles == 1024
    assert proportional.num_decode_tiles == 64 * 4 * 8
    assert proportional.tickets == (1, 2)


@given(tokens=st.integers(1, 10_000_000), sms=st.integers(1, 200))
def test_a_split_is_whole_steps_within_its_bounds(tokens: int, sms: int) -> None:
    split = choose_split_len(tokens, LLAMA, sms, 64)
    assert 256 <= split <= 2048
    assert split % 64 == 0


@given(longest=st.integers(0, 10_000))
def test_whatever_is_chosen_can_be_compiled_before_serving(longest: int) -> None:
    assert choose_config(longest) in CONFIGS.values()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_m": 48}, "block_m is 48; it must be a power of two"),
        ({"block_n": 8}, "block_n is 8"),
        ({"num_warps": 3}, "num_warps is 3"),
        ({"split_len": 100}, "split_len is 100; it must be a multiple of block_n_decode"),
        ({"ctas_per_sm": 0}, "ctas_per_sm is 0"),
    ],
)
def test_a_configuration_the_kernel_cannot_have_is_refused(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PodConfig("bad", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefill_s", "decode_s", "schedule"),
    [
        (1.0, 2.1, Schedule.PERSISTENT),
        (1.0, 2.0, Schedule.TICKET),
        (3.0, 1.0, Schedule.TICKET),
        (0.0, 0.0, Schedule.TICKET),
    ],
)
def test_blocks_persist_where_decoding_dominates(
    prefill_s: float, decode_s: float, schedule: Schedule
) -> None:
    assert choose_schedule(prefill_s, decode_s) is schedule
