"""Copies statistics into prometheus-client, at most once a second.

SGLang exports from several processes through prometheus-client's multiprocess mode, which knows
no callbacks, so counters are advanced by the difference to the last snapshot.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang_tiered.metrics import METRICS, Kind, Metric
from sglang_tiered.storage.base import Health

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.integration.observe.stats import ProcessStats
    from sglang_tiered.integration.observe.transfer_stats import TransferStats

__all__ = ["MetricsExporter", "samples"]

INTERVAL_S = 1.0


class MetricsExporter:
    """Exports one table of one scheduler process, on one thread. ``read`` must not block."""

    def __init__(
        self,
        read: Callable[[], ProcessStats | TransferStats],
        clock: Callable[[], float] = time.monotonic,
        metrics: Sequence[Metric] = METRICS,
    ) -> None:
        # After SGLang set PROMETHEUS_MULTIPROC_DIR, which prometheus-client reads at import.
        from prometheus_client import Counter, Gauge

        self._read = read
        self._metrics = metrics
        self._clock = clock
        self._due = clock()
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}
        self._series: dict[str, Any] = {
            metric.name: (
                Counter(metric.full_name, metric.help, metric.labels)
                if metric.kind is Kind.COUNTER
                else Gauge(
                    metric.full_name, metric.help, metric.labels, multiprocess_mode="livesum"
                )
            )
            for metric in metrics
        }

    def read_from(self, read: Callable[[], ProcessStats | TransferStats]) -> None:
        """Read from now on the statistics of tiers that were opened again."""
        self._read = read
        self._due = self._clock()  # before what begins at zero has grown past what was exported

    def export(self) -> None:
        """Publish a snapshot if the last one is old enough."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + INTERVAL_S
        stats = self._read()
        for metric in self._metrics:
            for labels, value in samples(metric, stats):
                series = self._series[metric.name]
                series = series.labels(*labels) if labels else series
                if metric.kind is Kind.GAUGE:
                    series.set(value)
                    continue
                last = self._seen.get((metric.name, labels), 0.0)
                series.inc(value - last if value >= last else value)
                self._seen[metric.name, labels] = value


def samples(
    metric: Metric, stats: ProcessStats | TransferStats
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield label values and value of each sample of one metric; nothing without a value."""
    value: Any = stats
    for name in metric.field.split("."):
        value = None if value is None else getattr(value, name)
    if isinstance(value, Health):
        yield (), float(value is Health.RUNNING)
    elif isinstance(value, dict):
        for key, count in value.items():
            labels = key if isinstance(key, tuple) else (key,)
            yield tuple(str(getattr(label, "value", label)) for label in labels), float(count)
    elif value is not None:
        yield (), float(value)
