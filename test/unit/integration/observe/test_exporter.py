"""Counters advance by differences, at most once a second, and cover every outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import prometheus_client
import pytest

from kit.process_stats import FULL, PLANNER, STATS, timed, with_engine
from kit.promtool import check_metrics
from sglang_tiered.integration.observe.stats import MetricsExporter
from sglang_tiered.metrics import BOUNDS_S, METRICS, Durations, MetricKind
from sglang_tiered.storage.base import Tier, TierStats
from sglang_tiered.storage.encoding import EncodingStats
from sglang_tiered.storage.stack.tier_stack import RemoteStats, StackStats

RANK = {"model_name": "m", "engine_type": "unified", "tp_rank": "1", "pp_rank": "0"}


def fields(of: type[Any], prefix: str) -> set[str]:
    left_out = {"health_reason", "reads", "stored_bytes", "capacity_bytes"}  # told in other ways
    return {
        f"{prefix}.{field.name}" for field in dataclasses.fields(of) if field.name not in left_out
    }


def test_no_count_of_a_tier_is_left_out() -> None:
    exported = {source.field for metric in METRICS for source in metric.sources}
    learnt = PLANNER.stats()
    reads = learnt.pop("reads")[Tier.NVME]
    counted = fields(TierStats, "nvme") | {f"planner.{name}" for name in learnt}
    counted |= (
        fields(EncodingStats, "codec")
        | fields(StackStats, "object.moved")
        | fields(RemoteStats, "peer.moved")
    )
    counted |= {f"{of}reads.{name}" for of in ("", "object.", "peer.") for name in reads}
    assert counted <= exported


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """Of exporters made from now on."""
    registry = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge", "Histogram"):
        kind = partial(getattr(prometheus_client, name), registry=registry)
        monkeypatch.setattr(prometheus_client, name, kind)
    return registry


@pytest.fixture
def value(registry: prometheus_client.CollectorRegistry) -> Callable[..., float | None]:
    """Values of their samples, of the rank's labels."""

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sglang_tiered_{name}", {**RANK, **labels})

    return value


def test_promtool_finds_no_fault_with_any_metric(
    registry: prometheus_client.CollectorRegistry,
) -> None:
    MetricsExporter(lambda: FULL, labels=RANK).export()
    check_metrics(prometheus_client.generate_latest(registry).decode())


def test_counters_follow_the_engine_and_never_double(value: Callable[..., float | None]) -> None:
    now, current = [0.0], [STATS]
    exporter = MetricsExporter(lambda: current[0], clock=lambda: now[0], labels=RANK)
    exporter.export()
    current[0] = with_engine(num_pages_stored=9)
    exporter.export()  # too early: the old figure stays
    assert value("stored_pages_total", tier="nvme") == 5
    now[0] = 1.0
    exporter.export()
    assert value("stored_pages_total", tier="nvme") == 9
    exporter.read_from(lambda: with_engine(num_pages_stored=1))
    assert value("stored_pages_total", tier="nvme") == 10
    corrupt = {"tier": "nvme", "operation": "load", "reason": "corrupt"}
    assert value("page_outcomes_total", **corrupt) == 4


def test_reason_has_a_series_before_it_happens(value: Callable[..., float | None]) -> None:
    """Or a rate of it would miss the first."""
    MetricsExporter(lambda: FULL, labels=RANK).export()
    for metric in METRICS:
        name = f"{metric.name}_total" if metric.kind is MetricKind.COUNTER else metric.name
        for source in metric.sources:
            for key in source.known:
                labels = zip(metric.labels, (*source.labels, *key), strict=True)
                assert value(name, **dict(labels)) is not None, (name, key)


def test_histogram_equals_what_was_recorded(value: Callable[..., float | None]) -> None:
    durations, now = Durations(), [0.0]
    took = [0.0, 0.0001, 0.00011, 0.02, 59.9, 60.0, 1000.0]
    stats = lambda: with_engine(store_durations=durations.take())  # noqa: E731
    exporter = MetricsExporter(stats, clock=lambda: now[0], labels=RANK)
    for seconds in took:
        durations.record(seconds)
        exporter.export()
        now[0] += 1.0
    name = "store_duration_seconds"
    assert value(f"{name}_sum", tier="nvme") == pytest.approx(sum(took))
    for bound in BOUNDS_S:
        at_most = sum(seconds <= bound for seconds in took)
        assert value(f"{name}_bucket", tier="nvme", le=str(bound)) == at_most, bound
    exporter.read_from(lambda: with_engine(store_durations=timed(0.5)))  # opened again
    assert value(f"{name}_count", tier="nvme") == len(took) + 1
