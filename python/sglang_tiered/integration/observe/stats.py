"""What a process tells of itself. Snapshots that the metric tables read: of a scheduler process
(``process_stats``), of its endpoint in a handoff (``transfer_stats``), and of what its tiers hold
(``holdings``). ``samples`` reads the rows of a table out of one, and ``MetricsExporter`` copies
them into prometheus-client, at most once a second.

SGLang exports from several processes through prometheus-client's multiprocess mode, which knows no
callbacks, so counters and histograms are advanced by the difference to the last snapshot. Every
series has the labels of its rank and so a single owner: gauges of several ranks stand side by side,
and nothing is added up here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_serving

from sglang_tiered import __version__
from sglang_tiered.codecs import NO_CODEC
from sglang_tiered.metrics import BOUNDS_S, METRICS, DurationCounts, Metric, MetricKind
from sglang_tiered.storage.base import Health, Tier
from sglang_tiered.storage.region.engine import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.transfer.decode import DecodeEndpoint
    from sglang_tiered.transfer.prefill import PrefillEndpoint


INTERVAL_S = 1.0

Stats = dict[str, Any]
"""By the names that paths in the tables begin with. Some of it goes on counting: read it at once,
on the thread that took it."""


def process_stats(
    storage: TieredStorage | None,
    tiering: Any = None,
    held: Mapping[str, Mapping[str, int]] | None = None,
) -> Stats:
    """Take a snapshot. Memory only, scheduler thread.

    ``storage``: None without tiers, and while they are detached. ``tiering``: None without tiers,
    and on a stage of a pipeline. ``held``: see ``holdings``.
    """
    bounded = {tier: dict(holding) for tier, holding in (held or {}).items()}
    for holding in bounded.values():
        if holding["capacity_bytes"] >= sys.maxsize:  # it has no cap
            del holding["capacity_bytes"], holding["capacity_tokens"]
    stats: Stats = {"build": _build(), "holdings": bounded}
    reads: Mapping[Tier, Any] = {}
    if tiering is not None:
        planner = tiering.planner.stats()
        reads = planner["reads"]
        stats |= {
            "planner": planner,
            "reads": reads[Tier.NVME],
            "spill": tiering.stores.queue,
            "copies": tiering.stores,
            "hints": tiering.hints,
            "waits": tiering.planner.loads.wait_stats(),
            "request_log_dropped": tiering.notes.num_dropped,
        }
    if storage is None:
        return stats
    stack, region = storage.stack, storage.region_engine
    encoding = region.encoding if isinstance(region, RegionEngine) else None
    if encoding is not None and encoding.name != NO_CODEC:
        stats["codec"] = encoding.stats()
    if stack.bucket is not None:
        stats["object"] = {
            "engine": stack.bucket.stats(),
            "bucket": stack.bucket.object_stats(),
            "moved": stack.stack_stats(),
            "reads": reads.get(Tier.OBJECT),
        }
    if (peers := stack.remote.get(Tier.PEER)) is not None:
        stats["peer"] = {
            "tier": peers.stats(),
            "moved": stack.remote_stats(Tier.PEER),
            "reads": reads.get(Tier.PEER),
        }
    return stats | {
        "nvme": stack.nvme.stats(),
        "host": storage.accounting,
        "admission": storage.gate.outcomes,
        "write_budget_bytes": storage.gate.budget_bytes,
        "budget": storage.budget,
    }


def health_reasons(stats: Stats) -> dict[str, str]:
    """Return why tiers are not running, or a bucket refuses changes: one clause each, by the
    tier's name."""
    found = {"nvme": stats["nvme"].health_reason} if "nvme" in stats else {}
    if "object" in stats:
        below = stats["object"]
        found["object"] = below["engine"].health_reason or below["bucket"].trouble
    if "peer" in stats:
        found["peer"] = stats["peer"]["tier"].health_reason
    return {name: reason for name, reason in found.items() if reason}


@functools.cache
def _build() -> dict[tuple[str, str], int]:
    """Return the versions of this package and of SGLang, with a 1."""
    return {(__version__, importlib.metadata.version("sglang")): 1}


def transfer_stats(endpoint: PrefillEndpoint | DecodeEndpoint) -> Stats:
    """Take a snapshot of what the endpoint of either role did since the start. Memory only, any
    thread."""
    rooms = {"num_peers": endpoint.num_sessions, "num_rooms": endpoint.num_rooms}
    return rooms | asdict(endpoint.stats)


def manager_of(scheduler: Any) -> Any:
    """Return the KV manager of a scheduler process; None where it hands nothing over, or hands it
    over through another backend."""
    for queue in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        manager = getattr(getattr(scheduler, queue, None), "kv_manager", None)
        if getattr(manager, "endpoint", None) is not None:
            return manager
    return None


def holdings(cache: Any) -> dict[str, dict[str, int]]:
    """Return the bytes and tokens that each tier of this rank can hold and holds: ``device``,
    ``host``, ``nvme`` and ``object``, the last as far as its listing was read. ``cache`` is a
    ``TieredRadixCache``. Memory only; the scheduler's thread.

    Bytes are this rank's, as stored, and tokens those of its replica, of which every rank has a
    part. A tier's capacity is in tokens as long as in host memory: with a codec it holds more.
    Where pools lie beside a model's KV (sliding windows, states, drafts), tokens are estimates.
    What is free to be taken again, but found until then, is held.
    """
    group = cache.cache_controller.mem_pool_host
    pools = [entry.host_pool for entry in group.entries]
    host_tokens = int(group.logical_size)
    host_bytes = sum(int(pool.size * getattr(pool, "size_per_token", 0)) for pool in pools)

    def in_tokens(capacity: int, num_free: int) -> dict[str, int]:
        held = capacity - num_free
        return {
            "capacity_bytes": capacity * host_bytes // max(host_tokens, 1),
            "capacity_tokens": capacity,
            "held_bytes": held * host_bytes // max(host_tokens, 1),
            "held_tokens": held,
        }

    def in_bytes(capacity: int, held: int, num_pages: int) -> dict[str, int]:
        """Of pages that may be encoded."""
        return {
            "capacity_bytes": capacity,
            "capacity_tokens": capacity * host_tokens // max(host_bytes, 1),
            "held_bytes": held,
            "held_tokens": num_pages // len(group.entries) * int(cache.page_size),
        }

    allocator = cache.token_to_kv_pool_allocator
    # Models with sliding windows have fewer of the window's slots than of the others.
    num_free = getattr(allocator, "full_available_size", allocator.available_size)
    found = {
        "device": in_tokens(int(allocator.size_full), int(num_free())),
        "host": in_tokens(host_tokens, int(group.available_size())),
    }
    storage = cache.storage
    if storage is None or storage.borrows:
        return found
    nvme = storage.region_engine.stats()
    found["nvme"] = in_bytes(nvme.capacity_bytes, nvme.stored_bytes, nvme.num_pages)
    if storage.stack.bucket is not None:
        bucket = storage.stack.bucket.stats()
        found["object"] = in_bytes(bucket.capacity_bytes, bucket.physical_bytes, bucket.num_pages)
    return found


class MetricsExporter:
    """Exports one table of one scheduler process, on one thread. ``read`` must not block.
    ``labels``, for every series, are those of this process's rank."""

    def __init__(
        self,
        read: Callable[[], Stats],
        clock: Callable[[], float] = time.monotonic,
        metrics: Sequence[Metric] = METRICS,
        *,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        # After SGLang set PROMETHEUS_MULTIPROC_DIR, which prometheus-client reads at import.
        from prometheus_client import Counter, Gauge, Histogram

        self._read = read
        self._metrics = metrics
        self._labels = _rank_labels() if labels is None else labels
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


def _rank_labels() -> dict[str, str]:
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
