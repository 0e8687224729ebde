"""``samples``: what a row of the metric table reads out of a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from sglang_tiered.metrics import DurationCounts
from sglang_tiered.storage.base import Health

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang_tiered.integration.observe.stats import MemoryStats, ProcessStats
    from sglang_tiered.integration.observe.transfer_stats import TransferStats
    from sglang_tiered.metrics import Metric

    Stats: TypeAlias = ProcessStats | TransferStats | MemoryStats

__all__ = ["samples", "state_of"]


def samples(
    metric: Metric, stats: Stats
) -> Iterator[tuple[tuple[str, ...], float | DurationCounts]]:
    """Yield label values and value of each series of one metric; nothing without a value. A
    histogram's are ``DurationCounts``, all others are numbers."""
    for source in metric.sources:
        value = _read(source.field, stats)
        if isinstance(value, dict):
            found = {_labels(key): float(number) for key, number in value.items()}
            for labels, number in {**dict.fromkeys(source.known, 0.0), **found}.items():
                yield (*source.labels, *labels), number
        elif isinstance(value, Health):
            yield source.labels, float(value is Health.RUNNING)
        elif isinstance(value, DurationCounts):
            yield source.labels, value
        elif value is not None:
            yield source.labels, float(value)


def state_of(metrics: Sequence[Metric], stats: Stats) -> dict[str, float | int]:
    """Return every sample as ``/server_info`` tells it: by the metric's name and the values of its
    labels, joined with colons; of histograms count and sum."""
    state: dict[str, float | int] = {}
    for metric in metrics:
        for labels, value in samples(metric, stats):
            key = ":".join((metric.name, *labels))
            if isinstance(value, DurationCounts):
                state[f"{key}:count"], state[f"{key}:sum"] = value.count, value.sum_s
            else:
                state[key] = value
    return state


def _read(field: str, stats: Any) -> Any:
    value = stats
    for name in field.split("."):
        if isinstance(value, dict):
            value = value.get(name)
        elif value is not None:
            value = getattr(value, name)
    return value


def _labels(key: Any) -> tuple[str, ...]:
    parts = key if isinstance(key, tuple) else (key,)
    return tuple(str(getattr(part, "value", part)) for part in parts)
