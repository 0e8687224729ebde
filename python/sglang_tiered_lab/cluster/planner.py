"""How a fleet is split into servers that prefill and servers that decode.

The candidates are every split, in steps, of each kind's servers, and none (all do both). One run
without a split tells how many tokens hits leave to be computed. From that and the trace's lengths
follows what each candidate can prefill and decode a second: ``D_p`` and ``D_d`` of DistServe's
search (Zhong et al., OSDI 2024), with our tiers in them. The simulator then judges the candidate
with the most to spare, and climbs from there over its neighbours while it gains.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_tiered.policy.balance import decode_rate, headroom_of, largest_batch
from sglang_tiered_lab.trace.cluster.plan import Member, Plan
from sglang_tiered_lab.trace.cluster.simulation import run_cluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered_lab.trace.cluster.outcome import Outcome
    from sglang_tiered_lab.trace.cluster.profiles import Kind
    from sglang_tiered_lab.trace.replay.server import Request


MAX_SHARE = 0.1
"""Of the candidates, how many are simulated at most; three in any case."""
LEAST_RUNS = 3

Split = tuple[int, ...] | None
"""Servers that prefill, by kind; the others decode. ``None``: all do both."""


@dataclass(frozen=True)
class Fleet:
    """Counts servers by kind, in order."""

    counts: tuple[tuple[Kind, int], ...]

    @classmethod
    def of(cls, members: Sequence[Member]) -> Fleet:
        counts: dict[str, tuple[Kind, int]] = {}
        for member in members:
            kind, count = counts.get(member.kind.name, (member.kind, 0))
            counts[member.kind.name] = (kind, count + 1)
        return cls(tuple(counts.values()))

    @property
    def num_servers(self) -> int:
        return sum(count for _, count in self.counts)

    def members(self, split: Split) -> list[Member]:
        if split is None:
            return [Member(kind=kind) for kind, count in self.counts for _ in range(count)]
        made = []
        for (kind, count), prefill in zip(self.counts, split, strict=True):
            made += [Member(kind=kind, role="prefill")] * prefill
            made += [Member(kind=kind, role="decode")] * (count - prefill)
        return made

    def describe(self, split: Split) -> str:
        if split is None:
            return " ".join(f"{count} {kind.name}" for kind, count in self.counts)
        return " ".join(
            f"{prefill}P:{count - prefill}D {kind.name}"
            for (kind, count), prefill in zip(self.counts, split, strict=True)
        )

    def splits(self, step: int) -> list[Split]:
        """Return every candidate: at least one server prefills and one decodes."""
        ranges = [sorted({*range(0, count + 1, step), count}) for _, count in self.counts]
        found: list[Split] = [None]
        for split in itertools.product(*ranges):
            if 0 < sum(split) < self.num_servers:
                found.append(split)
        return found

    def scaled(self, num_servers: int) -> Fleet:
        """Return a fleet of that many servers in about the same proportions."""
        total, made, before = self.num_servers, [], 0
        running = 0
        for kind, count in self.counts:
            running += count
            upto = round(running * num_servers / total)
            made.append((kind, upto - before))
            before = upto
        return Fleet(tuple((kind, count) for kind, count in made if count))


@dataclass
class Planner:
    """Finds the split of a fleet by which most requests keep both limits. ``outcomes`` are the
    runs so far."""

    plan: Plan
    requests: Sequence[Request]
    fleet: Fleet
    step: int = 1
    outcomes: dict[Split, Outcome] = field(default_factory=dict)

    @property
    def candidates(self) -> list[Split]:
        return self.fleet.splits(self.step)

    @property
    def max_runs(self) -> int:
        return max(LEAST_RUNS, int(MAX_SHARE * len(self.candidates)))

    def simulate(self, split: Split) -> Outcome:
        if split not in self.outcomes:
            plan = dataclasses.replace(self.plan, members=self.fleet.members(split))
            self.outcomes[split] = run_cluster(plan, self.requests)
        return self.outcomes[split]

    def search(self) -> Split:
        """Return the best split found with ``max_runs`` runs."""
        whole = self.simulate(None)
        spare = self._spare(whole.hit_rate)
        if not spare:
            return None
        top = max(spare, key=lambda split: spare[split])
        best: Split = None
        # Both ways of serving are looked at, whichever is better so far.
        around, stride = top, 2
        if self._value(self.simulate(top)) > self._value(whole):
            best = top
        while len(self.outcomes) < self.max_runs:
            split = self._next(around, stride, spare)
            if split is None:
                break
            stride = max(1, stride // 2)
            if self._value(self.simulate(split)) > self._value(self.outcomes[around]):
                around, stride = split, 4 * stride
            if self._value(self.outcomes[around]) > self._value(self.outcomes[best]):
                best = around
        return best

    def search_all(self) -> Split:
        """Return the best of all candidates."""
        return max(self.candidates, key=lambda split: self._value(self.simulate(split)))

    @staticmethod
    def _value(outcome: Outcome) -> tuple[float, float]:
        return outcome.goodput, -outcome.mean_ttft_s

    def _next(self, split: Split, stride: int, spare: dict[Split, float]) -> Split:
        """Return what to simulate next: more servers for the role by which more requests miss
        their limit, of the kind that leaves most to spare; or else a neighbour. ``None`` when all
        of that is known."""
        assert split is not None
        outcome = self.outcomes[split]
        late = float((~(outcome.ttft_s <= self.plan.ttft_s)).mean())
        slow = float((~(outcome.tpot_s <= self.plan.tpot_s)).mean())
        by = self.step if late >= slow else -self.step
        for moves in ((stride * by,), (by,), (self.step, -self.step)):
            found = []
            for position, (_, count) in enumerate(self.fleet.counts):
                for move in moves:
                    moved = list(split)
                    moved[position] = min(count, max(0, moved[position] + move))
                    found.append(tuple(moved))
            new = [one for one in found if one in spare and one not in self.outcomes]
            if new:
                return max(new, key=lambda one: spare[one])
        rest = [one for one in spare if one not in self.outcomes]
        return max(rest, key=lambda one: spare[one], default=None)

    def _spare(self, hit_rate: float) -> dict[Split, float]:
        """Return for every split how often over it could serve the trace, by its scarcer role."""
        requests, plan = self.requests, self.plan
        span_s = (requests[-1].arrival_s - requests[0].arrival_s) / plan.speed or 1.0
        rate = len(requests) / span_s
        new_s, decoded = {}, {}
        outputs = [max(1, request.output_tokens) for request in requests]
        contexts = [
            request.input_tokens + output / 2
            for request, output in zip(requests, outputs, strict=True)
        ]
        mean_context, mean_output = (sum(one) / len(requests) for one in (contexts, outputs))
        for kind, _ in self.fleet.counts:
            seconds = 0.0
            for request in requests:
                before = int(request.input_tokens * hit_rate)
                seconds += kind.hardware.prefill_s(request.input_tokens - before, before)
            new_s[kind.name] = seconds / len(requests)
            fixed, per_request, per_token = kind.step_s
            prices = fixed, per_request + per_token * mean_context
            fits = kind.kv_tokens / (mean_context + mean_output / 2)
            batch = largest_batch(prices, fits, plan.tpot_s)
            decoded[kind.name] = decode_rate(prices, batch) / mean_output
        spare: dict[Split, float] = {}
        for split in self.candidates:
            if split is None:
                continue
            pairs = list(zip(self.fleet.counts, split, strict=True))
            prefills = sum(number / new_s[kind.name] for (kind, _), number in pairs)
            decodes = sum((count - number) * decoded[kind.name] for (kind, count), number in pairs)
            spare[split] = headroom_of((prefills, decodes), (rate, rate))
        return spare


def largest_speed(plan: Plan, requests: Sequence[Request], goal: float, tries: int = 9) -> float:
    """Return the largest speed at which the share ``goal`` of requests keeps both limits, within a
    few percent; 0 where none does."""
    low, high, speed = 0.0, 0.0, plan.speed
    for _ in range(tries + 8):
        good = run_cluster(dataclasses.replace(plan, speed=speed), requests).goodput >= goal
        if good:
            low = speed
        else:
            high = speed
        if not high:
            speed *= 2
        elif not low:
            speed /= 2
        elif high / low < 1.03:
            break
        else:
            speed = (low + high) / 2
    return low


def fewest_servers(
    plan: Plan, requests: Sequence[Request], fleet: Fleet, goal: float, most: int
) -> tuple[int, Split] | None:
    """Return the fewest servers, in the fleet's proportions, that keep both limits for the share
    ``goal`` of the requests, with their split; ``None`` where ``most`` do not."""
    low, high = 0, most
    found: tuple[int, Split] | None = None
    while low + 1 < high or found is None:
        number = high if found is None else (low + high) // 2
        smaller = fleet.scaled(number)
        planner = Planner(plan, requests, smaller, step=max(1, number // 8))
        split = planner.search()
        if planner.outcomes[split].goodput >= goal:
            high, found = number, (number, split)
        elif found is None:
            return None
        else:
            low = number
    return found
