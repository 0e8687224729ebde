"""Copies statistics into prometheus-client, at most once a second.

SGLang exports from several processes through prometheus-client's multiprocess mode, which knows
no callbacks, so counters and histograms are advanced by the difference to the last snapshot. Every
series has the labels of its rank and so a single owner: gauges of several ranks stand side by side,
and nothing is added up here.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_tiered.integration.observe.samples import samples
from sglang_tiered.metrics import BOUNDS_S, METRICS, DurationCounts, Kind, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang_tiered.integration.observe.stats import ProcessStats
    from sglang_tiered.integration.observe.transfer_stats import TransferStats

__all__ = ["MetricsExporter"]

INTERVAL_S = 1.0

MAX_OBSERVED = 2_000
"""Durations that one export hands over, in the order of the table: prometheus-client takes them one
by one, in some microseconds each. The others follow with the next exports; the table's last
histogram, of the most, is the one that may lag."""


class MetricsExporter:
    """Exports one table of one scheduler process, on one thread. ``read`` must not block.
    ``labels`` are those of the rank, for every series."""

    def __init__(
        self,
        read: Callable[[], ProcessStats | TransferStats],
        clock: Callable[[], float] = time.monotonic,
        metrics: Sequence[Metric] = METRICS,
        *,
        labels: Mapping[str, str],
    ) -> None:
        # After SGLang set PROMETHEUS_MULTIPROC_DIR, which prometheus-client reads at import.
        from prometheus_client import Counter, Gauge, Histogram

        self._read = read
        self._metrics = metrics
        self._labels = dict(labels)
        self._clock = clock
        self._due = clock()
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}
        self._handed_over: dict[tuple[str, tuple[str, ...]], _HandedOver] = {}
        make: dict[Kind, Callable[..., Any]] = {
            Kind.COUNTER: Counter,
            Kind.GAUGE: partial(Gauge, multiprocess_mode="mostrecent"),
            Kind.HISTOGRAM: partial(Histogram, buckets=BOUNDS_S),
        }
        self._families = {
            metric.name: make[metric.kind](metric.full_name, metric.help, self._names(metric))
            for metric in metrics
        }

    def _names(self, metric: Metric) -> list[str]:
        """Return the names of the labels; an operator's label of the same name gives way."""
        return [*metric.labels, *(name for name in self._labels if name not in metric.labels)]

    def _series_of(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        """Return a series, which is there from now on, at zero."""
        series = self._series.get((metric.name, labels))
        if series is None:
            values = {**self._labels, **dict(zip(metric.labels, labels, strict=True))}
            series = self._families[metric.name].labels(**values)
            self._series[metric.name, labels] = series
        return series

    def read_from(self, read: Callable[[], ProcessStats | TransferStats]) -> None:
        """Read from now on the statistics of tiers that were opened again."""
        self._read = read
        self._due = self._clock()
        self.export()  # before what begins at zero has grown past what was exported

    def export(self) -> None:
        """Publish a snapshot if the last one is old enough."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + INTERVAL_S
        stats = self._read()
        num_left = MAX_OBSERVED
        for metric in self._metrics:
            for labels, value in samples(metric, stats):
                series, key = self._series_of(metric, labels), (metric.name, labels)
                if isinstance(value, DurationCounts):
                    handed_over = self._handed_over.setdefault(key, _HandedOver())
                    num_left -= handed_over.advance(series, value, num_left)
                    continue
                last = self._seen.get(key)
                if value == last:
                    continue
                self._seen[key] = value
                if metric.kind is Kind.GAUGE:
                    series.set(value)
                else:
                    last = last or 0.0
                    series.inc(value - last if value >= last else value)


class _HandedOver:
    """Holds what one histogram's series was told so far, by bucket."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sums_s = [0.0] * (len(BOUNDS_S) + 1)

    def advance(self, series: Any, durations: DurationCounts, most: int) -> int:
        """Tell the series of at most so many new durations; return of how many. Each is told as the
        mean of the new ones of its bucket, which keeps buckets, count and sum as they were."""
        if any(now < told for now, told in zip(durations.counts, self._counts, strict=True)):
            self._start()  # of tiers that were opened again
        num_told = 0
        for bucket, count in enumerate(durations.counts):
            num_new = count - self._counts[bucket]
            num_now = min(num_new, most - num_told)
            if num_now <= 0:
                continue
            low = math.nextafter(BOUNDS_S[bucket - 1], math.inf) if bucket else 0.0
            high = BOUNDS_S[bucket] if bucket < len(BOUNDS_S) else math.inf
            mean_s = (durations.sums_s[bucket] - self._sums_s[bucket]) / num_new
            mean_s = min(max(mean_s, low), high)  # whatever was rounded
            for _ in range(num_now):
                series.observe(mean_s)
            self._counts[bucket] += num_now
            self._sums_s[bucket] += mean_s * num_now
            num_told += num_now
        return num_told
