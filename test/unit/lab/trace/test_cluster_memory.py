"""What a modelled server keeps, in which tier, and what it prefills together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from sglang_tiered_lab.trace.cluster.outcome import Outcome
from sglang_tiered_lab.trace.cluster.plan import Member, Plan
from sglang_tiered_lab.trace.cluster.profiles import Kind, load_profiles
from sglang_tiered_lab.trace.cluster.simulation import run_cluster
from sglang_tiered_lab.trace.replay.server import Request

PAGE = 64
SMALL = dataclasses.replace(
    load_profiles().kind("h100", "llama-3.1-8b"),
    kv_tokens=64 * PAGE,
    host_tokens=128 * PAGE,
    nvme_tokens=10_000 * PAGE,
)


def one(kind: Kind = SMALL, tiers: str = "") -> Plan:
    return Plan(
        members=[Member(kind=kind)],
        policy="in-turn",
        unit_tokens=PAGE,
        tiers=frozenset(tiers.split()),
    )


def serve(requests: Sequence[Request], kind: Kind = SMALL, tiers: str = "") -> Outcome:
    return run_cluster(one(kind, tiers), requests)


def ask(at_s: float, prompt: int, num_tokens: int, num_new: int = 1) -> Request:
    """A prompt of its own number, in pages."""
    first = 1000 * prompt
    return Request(at_s, num_tokens, num_new, range(first, first - (-num_tokens // PAGE)), False)


def test_prompts_that_wait_are_prefilled_together() -> None:
    hardware = SMALL.hardware
    prompts = [ask(0, 0, 10 * PAGE), *(ask(1e-4, n, 5 * PAGE) for n in (1, 2, 3))]
    found = serve(prompts)
    fixed_s = hardware.prefill_fixed_s
    together_s = fixed_s + 3 * (hardware.prefill_s(5 * PAGE, 0) - fixed_s)
    first_s = hardware.prefill_s(10 * PAGE, 0)
    assert found.ttft_s[0] == pytest.approx(first_s)
    # Beside the first one's decode, which has ended by then.
    assert found.ttft_s[1:] == pytest.approx([first_s + together_s - 1e-4] * 3, rel=1e-3)
    found = serve(prompts, dataclasses.replace(SMALL, chunk_tokens=10 * PAGE))
    assert found.ttft_s[1] == found.ttft_s[2] < found.ttft_s[3], "no more than a chunk"
