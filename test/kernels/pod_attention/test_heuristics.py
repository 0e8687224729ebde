"""Choices made on the host: tickets, splits and configurations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered_kernels.pod_attention import CONFIGS, PodConfig, PodShape, Schedule, make_plan
from sglang_tiered_kernels.pod_attention.heuristics import (
    choose_config,
    choose_schedule,
    choose_split_len,
)

LLAMA = PodShape(32, 8, 128, 64, torch.bfloat16, torch.bfloat16)


def test_tickets_follow_the_counts_of_tiles() -> None:
    # 32 blocks of 64 queries by 32 heads, and 64 rows in 4 splits by 8 heads.
    extend, prefix = [2048] + [1] * 64, [8192 - 2048] + [8191] * 64
    config = PodConfig("p", split_len=2048)
    plan = make_plan(extend, prefix, LLAMA, num_sms=132, config=config)
    assert (plan.num_prefill_tiles, plan.num_decode_tiles) == (1024, 2048)
    assert plan.tickets == (1, 2)


@given(tokens=st.integers(1, 10_000_000), sms=st.integers(1, 200), longest=st.integers(0, 10_000))
def test_whatever_is_chosen_can_be_compiled(tokens: int, sms: int, longest: int) -> None:
    split = choose_split_len(tokens, LLAMA, sms, 64)
    assert 256 <= split <= 2048 and split % 64 == 0
    assert choose_config(longest) in CONFIGS.values()
    assert choose_schedule(1.0, 2.1) is Schedule.PERSISTENT
    assert choose_schedule(1.0, 2.0) is Schedule.TICKET


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_m": 48}, "block_m is 48; it must be a power of two"),
        ({"split_len": 100}, "split_len is 100; it must be a multiple of block_n_decode"),
        ({"ctas_per_sm": 0}, "ctas_per_sm is 0"),
    ],
)
def test_a_configuration_the_kernel_cannot_have_is_refused(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PodConfig("bad", **changes)  # type: ignore[arg-type]
