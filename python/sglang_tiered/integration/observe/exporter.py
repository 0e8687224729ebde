"""Reads the rows of a metric table out of a snapshot (``samples``), and copies them into
prometheus-client, at most once a second.

SGLang exports from several processes through prometheus-client's multiprocess mode, which knows no
callbacks, so counters and histograms are advanced by the difference to the last snapshot. Every
series has the labels of its rank and so a single owner: gauges of several ranks stand side by side,
and nothing is added up here.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_serving

from sglang_tiered.metrics import BOUNDS_S, METRICS, DurationCounts, Metric, MetricKind
from sglang_tiered.storage.base import Health

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sglang_tiered.integration.observe.stats import Stats


INTERVAL_S = 1.0


class MetricsExporter:
    """Exports one table of one scheduler process, on one thread. ``read`` must not block.
    ``labels`` are those of the rank, for every series."""

    def __init__(
        self,
        read: Callable[[], Stats],
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
        self._series: dict[str, dict[tuple[str, ...], Any]] = {one.name: {} for one in metrics}
        self._told: dict[tuple[str, tuple[str, ...]], Any] = {}
        make: dict[MetricKind, Callable[..., Any]] = {
            MetricKind.COUNTER: Counter,
            MetricKind.GAUGE: partial(Gauge, multiprocess_mode="mostrecent"),
            MetricKind.HISTOGRAM: partial(Histogram, buckets=BOUNDS_S),
        }
        self._families = {
            metric.name: make[metric.kind](metric.full_name, metric.help, self._names(metric))
            for metric in metrics
        }

    def _names(self, metric: Metric) -> list[str]:
        """Return the names of the labels; an operator's label of the same name gives way."""
        return [*metric.labels, *(name for name in self._labels if name not in metric.labels)]

    def read_from(self, read: Callable[[], Stats]) -> None:
        """Read from now on what another endpoint counts, from zero."""
        self._read = read
        self.export_now()

    def export(self) -> None:
        """Publish a snapshot if the last one is old enough."""
        if self._clock() >= self._due:
            self.export_now()

    def export_now(self) -> None:
        """Publish a snapshot. Call it when tiers come or go, before what begins at zero has grown
        past what was exported. Gauges that the snapshot lacks are 0: a tier that is gone holds
        nothing, and is not healthy."""
        self._due = self._clock() + INTERVAL_S
        stats = self._read()
        for metric in self._metrics:
            found: dict[tuple[str, ...], Any] = {}
            if metric.kind is MetricKind.GAUGE:
                found = dict.fromkeys(self._series[metric.name], 0.0)
            for labels, value in (found | dict(samples(metric, stats))).items():
                self._tell(metric, labels, value)

    def _tell(self, metric: Metric, labels: tuple[str, ...], value: Any) -> None:
        """Bring a series up to date, which is there from now on, at zero."""
        series = self._series[metric.name].get(labels)
        if series is None:
            values = {**self._labels, **dict(zip(metric.labels, labels, strict=True))}
            series = self._families[metric.name].labels(**values)
            self._series[metric.name][labels] = series
        key = (metric.name, labels)
        last, self._told[key] = self._told.get(key), value
        if value == last:
            return
        if isinstance(value, DurationCounts):
            _advance(series, value, last or DurationCounts())
        elif metric.kind is MetricKind.GAUGE:
            series.set(value)
        else:
            last = last or 0.0
            series.inc(value - last if value >= last else value)


def _advance(series: Any, durations: DurationCounts, told: DurationCounts) -> None:
    """Tell a histogram's series what is new. prometheus-client takes durations one by one, in 5 to
    10 us each; a fast disk brings thousands a second, so they go into its buckets together."""
    if any(now < before for now, before in zip(durations.counts, told.counts, strict=True)):
        told = DurationCounts()  # of tiers that were opened again
    for bucket, count, before in zip(series._buckets, durations.counts, told.counts, strict=True):  # noqa: SLF001
        if count > before:
            bucket.inc(count - before)
    series._sum.inc(max(0.0, durations.sum_s - told.sum_s))  # noqa: SLF001


def rank_labels() -> dict[str, str]:
    """Return the labels that SGLang gives the metrics of this scheduler process, as
    ``SchedulerMetricsCollector.init_new`` does: those of ``--extra-metric-labels`` too, and
    ``dp_rank`` only where there are replicas."""
    parallel, disagg = get_parallel(), get_disagg()
    labels = {
        "model_name": get_serving().served_model_name,
        "engine_type": "dynamic"  # its role may change, and its series do not
        if disagg.enable_pd_role_switch
        else DisaggregationMode.to_engine_type(disagg.disaggregation_mode),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
    }
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    labels.update(get_observability().extra_metric_labels or {})
    return {name: str(value) for name, value in labels.items()}


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
