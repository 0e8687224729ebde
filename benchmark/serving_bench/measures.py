"""From samples to figures: percentiles, hit rates, quotients round by round, equality."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving_bench.client import TIERS, Sample
from serving_bench.setting import PAGE_SIZE
from storage_bench.figures import percentile, quotients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


# What each system was asked in one round, and answered.
Round = dict[str, list[Sample]]


def reusable_tokens(sample: Sample) -> int:
    """Prompt tokens a perfect cache would serve: whole pages of what was seen before. The last
    token of a prompt is always computed."""
    return min(sample.num_reusable, sample.num_prompt - 1) // PAGE_SIZE * PAGE_SIZE


def hit_rate(samples: Iterable[Sample]) -> float:
    """Tokens served from any tier over those a perfect cache would have served."""
    taken = list(samples)
    usable = sum(map(reusable_tokens, taken))
    return sum(sample.num_cached for sample in taken) / usable if usable else 0.0


def hits_by_tier(samples: Iterable[Sample]) -> dict[str, int]:
    taken = list(samples)
    return {tier: sum(sample.cached[tier] for sample in taken) for tier in TIERS}


def mean_ttft(samples: Sequence[Sample]) -> float:
    return statistics.fmean(sample.ttft_s for sample in samples)


def ttft_percentile(share: float) -> Callable[[Sequence[Sample]], float]:
    def measure(samples: Sequence[Sample]) -> float:
        return percentile([sample.ttft_s for sample in samples], share)

    return measure


def throughput(samples: Sequence[Sample]) -> float:
    """Prompt and output tokens per second, from the first request sent to the last answered."""
    tokens = sum(sample.num_prompt + len(sample.output_ids) for sample in samples)
    start_s = min(sample.started_s for sample in samples)
    return tokens / (max(sample.ended_s for sample in samples) - start_s)


def round_quotients(
    rounds: Sequence[Round], over: str, measure: Callable[[list[Sample]], float]
) -> list[float]:
    """``tiered`` over another system, round by round."""
    return quotients(
        [measure(one["tiered"]) for one in rounds], [measure(one[over]) for one in rounds]
    )


def unequal_labels(rounds: Iterable[Round]) -> list[str]:
    """Requests that two systems answered differently, or that one was never asked."""
    unequal: list[str] = []
    for one in rounds:
        answers = {
            name: {sample.label: sample.output_ids for sample in samples}
            for name, samples in one.items()
        }
        labels = dict.fromkeys(label for taken in answers.values() for label in taken)
        unequal += [
            label for label in labels if len({taken.get(label) for taken in answers.values()}) > 1
        ]
    return unequal


@dataclass
class Outcome:
    """Everything one scenario asked. ``rounds`` are measured; ``beside`` were asked as well, by
    what they were, and count for equality only."""

    rounds: list[Round] = field(default_factory=list)
    beside: dict[str, list[Round]] = field(default_factory=dict)
    moved_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)  # read, written
    new_tokens: int = 0  # tokens whose KV did not exist before, per system
    conditions: str = ""  # cache state and sizes, in words

    @property
    def all_rounds(self) -> list[Round]:
        return [*self.rounds, *(one for taken in self.beside.values() for one in taken)]

    def samples(self, system: str) -> list[Sample]:
        return [sample for one in self.rounds for sample in one.get(system, [])]

    @property
    def systems(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.rounds for name in one))


def describe_samples(samples: Sequence[Sample]) -> dict[str, float]:
    """The figures of one system's row, in seconds and tokens."""
    ttft = [sample.ttft_s for sample in samples]
    itl = [gap for sample in samples for gap in sample.itl_s]
    latency = [sample.latency_s for sample in samples]
    figures = {"requests": float(len(samples)), "ttft_mean_s": statistics.fmean(ttft)}
    for name, values in (("ttft", ttft), ("itl", itl), ("latency", latency)):
        for share in (0.5, 0.9, 0.99):
            if values:
                figures[f"{name}_p{round(share * 100)}_s"] = percentile(values, share)
    figures["hit_rate"] = hit_rate(samples)
    figures |= {f"hit_tokens_{tier}": float(n) for tier, n in hits_by_tier(samples).items()}
    return figures
