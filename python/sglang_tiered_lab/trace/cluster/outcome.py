"""What a run of a cluster counts, and the figures that follow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered_lab.trace.cluster.plan import Plan
    from sglang_tiered_lab.trace.cluster.server import Job, Server


TIERS = ("device", "host", "nvme", "peer", "bucket")


class Outcome:
    """Collects one run; ``close`` ends it. Times per request are NaN where it was shed."""

    def __init__(self, num_requests: int, plan: Plan) -> None:
        self.plan = plan
        self.ttft_s = np.full(num_requests, math.nan)
        self.tpot_s = np.full(num_requests, math.nan)
        self.done_s = np.full(num_requests, math.nan)
        self.priority = np.zeros(num_requests, np.int8)
        self.tokens = np.zeros((num_requests, 2), np.int64)  # of prompt and answer
        self.hit_tokens = dict.fromkeys(TIERS, 0)
        self.link_bytes = dict.fromkeys(TIERS, 0)
        self.handoff_bytes = 0
        self.prompt_tokens = 0
        self.outside_s = [member.kind.outside_s for member in plan.members]
        self.num_shed = self.num_falsely_shed = self.num_restarted = 0
        self.switches: list[tuple[float, int, str]] = []  # when a server took which role
        self.last_arrival_s = self.wall_s = 0.0
        self.busy = self.max_over_mean = 0.0

    def began(self, job: Job, hits: tuple[int, int, int]) -> None:
        device, host, loaded = hits
        found = self.hit_tokens
        found["device"] += device
        found["host"] += host
        self.link_bytes["host"] += host  # times the bytes of a token, at the end
        # Of a load that was overtaken by the device the nearest tiers' part is what was not used.
        for tier, tokens in zip(reversed(TIERS[2:]), reversed(job.parts or (0, 0, 0)), strict=True):
            taken = min(tokens, loaded)
            found[tier] += taken
            loaded -= taken
        self.prompt_tokens += job.tokens

    def loaded(self, parts: Sequence[int], token_bytes: int) -> None:
        for tier, tokens in zip(TIERS[2:], parts, strict=True):
            self.link_bytes[tier] += tokens * token_bytes

    def answered(self, job: Job, now_s: float) -> None:
        if math.isnan(job.first_s):
            job.first_s = now_s
            self.ttft_s[job.number] = now_s - job.arrival_s + self.outside_s[job.server]

    def ended(self, job: Job, now_s: float) -> None:
        number, request = job.number, job.request
        steps = max(1, request.output_tokens) - 1
        self.tpot_s[number] = (now_s - job.first_s) / steps if steps else 0.0
        self.done_s[number] = now_s
        self.priority[number] = job.priority
        self.tokens[number] = request.input_tokens, request.output_tokens

    def shed(self, job: Job, could_have_been_served: bool) -> None:
        self.priority[job.number] = job.priority
        self.num_shed += 1
        self.num_falsely_shed += could_have_been_served

    def close(self, servers: Sequence[Server], pressed: Sequence[float], wall_s: float) -> None:
        self.wall_s = wall_s
        mine = [server for server in servers if server.role != "decode"]
        over_s = max(1e-9, self.last_arrival_s)
        self.busy = sum(pressed[server.number] for server in mine) / over_s / len(mine)
        loads = [server.computed_tokens for server in mine]
        self.max_over_mean = max(loads) / (sum(loads) / len(loads)) if sum(loads) else 1.0
        token_bytes = servers[0].kind.hardware.kv_bytes_per_token
        self.link_bytes["host"] *= token_bytes

    # ---- Figures ----

    @property
    def num_requests(self) -> int:
        return len(self.ttft_s)

    @property
    def is_good(self) -> Any:
        """By request: both limits were kept."""
        return (self.ttft_s <= self.plan.ttft_s) & (self.tpot_s <= self.plan.tpot_s)

    @property
    def goodput(self) -> float:
        """Return the share of all requests, those shed included, that kept both limits."""
        return float(np.mean(self.is_good)) if self.num_requests else 0.0

    @property
    def mean_ttft_s(self) -> float:
        return float(np.nanmean(self.ttft_s)) if self.num_shed < self.num_requests else math.nan

    @property
    def hit_rate(self) -> float:
        return sum(self.hit_tokens.values()) / max(1, self.prompt_tokens)

    @property
    def price_per_hour(self) -> float:
        return sum(member.kind.price_per_hour for member in self.plan.members)

    @property
    def good_requests_per_s(self) -> float:
        return float(np.sum(self.is_good)) / max(1e-9, self.last_arrival_s)

    @property
    def price_per_million_good_tokens(self) -> float:
        """Of prompts and answers of requests that kept both limits, over the time of arrivals."""
        tokens = float(self.tokens[self.is_good].sum())
        hours = self.last_arrival_s / 3600
        return self.price_per_hour * hours / tokens * 1e6 if tokens else math.inf

    @property
    def tokens_per_s(self) -> float:
        """Prompts and answers over the time until the last one ended."""
        if self.num_shed == self.num_requests:
            return 0.0
        return float(self.tokens.sum()) / max(1e-9, float(np.nanmax(self.done_s)))

    def figures(self) -> dict[str, Any]:
        served = self.ttft_s[~np.isnan(self.ttft_s)]
        steps = self.tpot_s[~np.isnan(self.tpot_s)]
        marks = (50, 90, 99, 99.9)
        quantiles = np.percentile(served, marks) if len(served) else [math.nan] * 4
        good = self.is_good
        return {
            "policy": self.plan.policy,
            "speed": self.plan.speed,
            "goodput": self.goodput,
            "good_requests_per_s": self.good_requests_per_s,
            "tokens_per_s": self.tokens_per_s,
            "mean_ttft_s": self.mean_ttft_s,
            **{f"ttft_p{mark:g}_s": float(q) for mark, q in zip(marks, quantiles, strict=True)},
            "mean_tpot_s": float(np.mean(steps)) if len(steps) else math.nan,
            "tpot_p99_s": float(np.percentile(steps, 99)) if len(steps) else math.nan,
            "hit_rate": self.hit_rate,
            "hit_share": {
                tier: tokens / max(1, self.prompt_tokens)
                for tier, tokens in self.hit_tokens.items()
            },
            "link_bytes": {**self.link_bytes, "handoff": self.handoff_bytes},
            "busy": self.busy,
            "max_over_mean": self.max_over_mean,
            "shed": self.num_shed,
            "falsely_shed": self.num_falsely_shed,
            "restarted": self.num_restarted,
            "switches": self.switches,
            "goodput_by_class": [
                float(np.mean(good[self.priority == number]))
                for number in range(len(self.plan.classes))
                if np.any(self.priority == number)
            ],
            "price_per_hour": self.price_per_hour,
            "price_per_million_good_tokens": self.price_per_million_good_tokens,
            "wall_s": self.wall_s,
            "requests_per_wall_s": self.num_requests / max(1e-9, self.wall_s),
        }
