"""The settings of published plans in the simulator, beside what was published of them.

DistServe (Zhong et al., OSDI 2024), by its authors' introduction, "Throughput is not all you need"
(Hao AI Lab, March 2024): a model of 13 billion parameters on A100 80GB, prompts of 512 tokens and
answers of 64, 90% within 0.4 s to the first token and 40 ms a token. Splitwise (Patel et al., ISCA
2024): a model of 70 billion parameters on DGX machines, medians of prompts and answers of 1,500
and 13 tokens (coding) and 1,020 and 129 (conversation), H100 machines at 2.16 times the price; up
to 2.35 times the throughput for the same cost and power, or 1.4 times at 20% less cost.
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered_lab.cluster.planner import Fleet, Planner, largest_speed
from sglang_tiered_lab.trace.cluster.plan import Member, Plan
from sglang_tiered_lab.trace.cluster.profiles import load_profiles
from sglang_tiered_lab.trace.replay.server import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


GOAL = 0.9
UNIT = 64
WHOLE_PROMPT = 1 << 20  # tokens in a chunk: servers of that time did not cut prompts
SPLITWISE_PRICE = 2.16
SPLITWISE_GAIN = 2.35
SIGMA = 0.7
"""Of lognormal lengths around the published medians; their scatter is our choice."""


@dataclass(frozen=True)
class Row:
    """``published`` is the quotient or rate that its authors print, ``modelled`` ours."""

    what: str
    published: float
    modelled: float


def _poisson(count: int, lengths: Callable[[random.Random], tuple[int, int]]) -> list[Request]:
    """One request a second, with prompts that share nothing."""
    draw = random.Random(7)
    made, now_s, unit = [], 0.0, 0
    for _ in range(count):
        now_s += draw.expovariate(1.0)
        prompt, answer = lengths(draw)
        num_units = -(-prompt // UNIT)
        made.append(Request(now_s, prompt, answer, range(unit, unit + num_units), False))
        unit += num_units
    return made


def distserve(count: int = 1000) -> Iterator[Row]:
    """Yield requests a second and GPU, each beside the published one."""
    kind = load_profiles().kind("a100", "opt-13b")
    whole = dataclasses.replace(kind, chunk_tokens=WHOLE_PROMPT)
    both, prefill, decode = (
        Member(kind=whole, role=role) for role in ("both", "prefill", "decode")
    )
    requests = _poisson(count, lambda _: (512, 64))
    first_only = [request._replace(output_tokens=1) for request in requests]

    def rate(members: list[Member], trace: list[Request]) -> float:
        plan = Plan(
            members=members,
            policy="cost",
            unit_tokens=UNIT,
            ttft_s=0.4,
            tpot_s=0.04,
            tiers=frozenset(),
        )
        return largest_speed(plan, trace, GOAL)

    yield Row("one GPU that does both", 1.6, rate([both], requests))
    yield Row("one GPU that only prefills", 5.6, rate([both], first_only))
    yield Row("one GPU that only decodes", 10.0, rate([prefill] * 8 + [decode], requests))
    yield Row(
        "2 that prefill and 1 that decodes", 3.3, rate([prefill] * 2 + [decode], requests) / 3
    )
    yield Row("one GPU that does both, in chunks", math.nan, rate([Member(kind=kind)], requests))


def splitwise(count: int = 1500, num_h100: int = 8) -> Iterator[Row]:
    """Yield throughputs over that of H100 machines that do both, all for the same money."""
    profiles = load_profiles()
    h100, a100 = (
        dataclasses.replace(profiles.kind(f"8x{name}", "llama-2-70b"), chunk_tokens=WHOLE_PROMPT)
        for name in ("h100", "a100")
    )
    num_a100 = round(num_h100 * SPLITWISE_PRICE)
    half = num_h100 // 2
    fleets = {
        "H100": Fleet(((h100, num_h100),)),
        "A100": Fleet(((a100, num_a100),)),
        "H100 and A100": Fleet(((h100, half), (a100, round(half * SPLITWISE_PRICE)))),
    }
    for load, prompt, answer in (("coding", 1500, 13), ("conversation", 1020, 129)):
        requests = _poisson(
            count,
            lambda draw, prompt=prompt, answer=answer: (  # type: ignore[misc]
                min(16_000, 1 + int(prompt * draw.lognormvariate(0, SIGMA))),
                min(2_000, 1 + int(answer * draw.lognormvariate(0, SIGMA))),
            ),
        )
        # Within 3 times the first token's and 1.5 times the next ones' time of an idle A100.
        alone_s = a100.hardware.prefill_s(prompt, 0)
        plan = Plan(
            members=(),
            policy="cost",
            unit_tokens=UNIT,
            ttft_s=3 * alone_s,
            tpot_s=1.5 * sum(a100.step_s[:2]),
            tiers=frozenset(),
        )
        found = {}
        for name, fleet in fleets.items():
            unsplit = dataclasses.replace(plan, members=fleet.members(None))
            speed = largest_speed(unsplit, requests, GOAL)
            busy = dataclasses.replace(plan, speed=max(speed, 0.1) * 1.3)
            split = _best_split(Planner(busy, requests, fleet, step=max(1, fleet.num_servers // 8)))
            parted = dataclasses.replace(plan, members=fleet.members(split))
            found[name] = speed, largest_speed(parted, requests, GOAL)
        base = found["H100"][0] or math.nan
        yield Row(f"{load}: A100 that do both", math.nan, found["A100"][0] / base)
        for name, (_, speed) in found.items():
            yield Row(f"{load}: {name}, split", math.nan, speed / base)
        best = max(speed for _, speed in found.values())
        yield Row(f"{load}: the best of these", SPLITWISE_GAIN, best / base)


def _best_split(planner: Planner) -> tuple[int, ...]:
    """Return the best split that is one."""
    planner.search()
    parted = {split: run for split, run in planner.outcomes.items() if split is not None}
    return max(parted, key=lambda split: parted[split].goodput)
