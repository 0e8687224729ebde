"""Counters advance by differences, at most once a second, and cover every outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import prometheus_client
import pytest

from kit.process_stats import FULL, STATS, timed, with_engine
from kit.promtool import check_metrics
from sglang_tiered.integration.cache.load_planner import LoadPlanner
from sglang_tiered.integration.observe.exporter import MetricsExporter, samples, state_of
from sglang_tiered.integration.observe.stats import PlannerStats, ProcessStats, TierReads
from sglang_tiered.metrics import BOUNDS_S, METRICS, DurationCounts, Durations, MetricKind
from sglang_tiered.policy.admission import Outcome
from sglang_tiered.policy.cost_model import CostModel, LoadDecision
from sglang_tiered.policy.hints import HintEnd
from sglang_tiered.policy.page_accounting import EvictionOutcome
from sglang_tiered.storage.base import JobKind, Reason, TierStats
from sglang_tiered.storage.encoding import EncodingStats
from sglang_tiered.storage.stack.tiers import RemoteStats, StackStats

RANK = {"model_name": "m", "engine_type": "unified", "tp_rank": "1", "pp_rank": "0"}


def fields(of: type[Any], prefix: str) -> set[str]:
    left_out = {"health_reason", "reads", "stored_bytes", "capacity_bytes"}  # told in other ways
    return {
        f"{prefix}.{field.name}" for field in dataclasses.fields(of) if field.name not in left_out
    }


def test_no_count_of_a_tier_is_left_out() -> None:
    exported = {source.field for metric in METRICS for source in metric.sources}
    counted = fields(TierStats, "nvme") | fields(PlannerStats, "planner")
    counted |= (
        fields(EncodingStats, "codec")
        | fields(StackStats, "object.moved")
        | fields(RemoteStats, "peer.moved")
    )
    for prefix in ("", "object.", "peer."):
        counted |= fields(TierReads, f"{prefix}reads")
    assert counted <= exported


def test_every_metric_reads_a_field_that_exists() -> None:
    """A tier that has no value for it yet gives none, but the path must be right."""
    for metric in METRICS:
        for source in metric.sources:
            only = dataclasses.replace(metric, sources=(source,))
            found = list(samples(only, FULL))
            if not found:
                assert source.field.endswith(
                    ("_per_s", "write_budget_bytes", "_prices")
                ) or source.labels == ("object",), source
            assert all(len(labels) == len(metric.labels) for labels, _ in found), metric.name


def test_known_label_values_are_those_of_the_code() -> None:
    known = {
        (metric.name, *source.labels): set(source.known)
        for metric in METRICS
        for source in metric.sources
        if source.known
    }
    load_only, store_only = ("miss", "corrupt"), ("duplicate", "no_space", "rejected", "over_share")
    engine = {
        (kind.value, reason.value)
        for kind in JobKind
        for reason in Reason
        if reason.value not in (load_only if kind is JobKind.STORE else store_only)
    }
    assert known == {
        ("page_outcomes", "nvme"): engine,
        ("page_outcomes", "object"): engine,
        ("page_outcomes", "peer"): set(FULL.peer.failures),
        ("admission_pages",): {(each.value,) for each in Outcome},
        ("load_decision_tokens",): {(each.value,) for each in LoadDecision},
        ("hints_ended",): {(each.value,) for each in HintEnd},
        ("host_left_pages",): {(each.value,) for each in EvictionOutcome},
        ("object_requests",): {(kind,) for kind in ("put", "get", "list", "delete", "head")},
        ("object_refused",): {(kind,) for kind in ("put", "delete")},
        ("peer_purges",): {(each,) for each in FULL.peer.purges},
    }


def samples_of(name: str, stats: ProcessStats) -> dict[tuple[str, ...], float | DurationCounts]:
    metric = next(metric for metric in METRICS if metric.name == name)
    return dict(samples(metric, stats))


def test_prices_are_exported_once_learnt() -> None:
    planner = LoadPlanner[str](CostModel(page_tokens=64, bytes_per_token=1000))

    def found(name: str) -> dict[tuple[str, ...], float | DurationCounts]:
        return samples_of(name, dataclasses.replace(STATS, planner=planner.stats()))

    assert found("prefill_price_seconds") == found("load_price_seconds") == {}
    planner.note_batch([(2048, 0)], 0.5)
    planner.costs.transfers[1].observe(1 << 20, 0.25)
    prefill, load = planner.costs.prefill.all_prices, planner.costs.transfers[1].prices
    assert found("prefill_price_seconds") == {
        (unit,): price
        for unit, price in zip(("batch", "token", "pair", "copied_token"), prefill, strict=True)
    }
    assert found("load_price_seconds") == {("peer", "load"): load[0], ("peer", "byte"): load[1]}


def test_a_tier_is_exported_only_if_configured() -> None:
    def tiers(stats: ProcessStats) -> set[str]:
        return {
            labels[0]
            for metric in METRICS
            if metric.tiers and metric.name.startswith(("tier_", "loaded_", "page_"))
            for labels, _ in samples(metric, stats)
        }

    assert tiers(STATS) == {"device", "host", "nvme"}
    assert tiers(FULL) == {"device", "host", "nvme", "object", "peer"}
    assert samples_of("tier_healthy", FULL) == {("nvme",): 1.0, ("object",): 0.0, ("peer",): 1.0}
    assert samples_of("object_requests", STATS) == samples_of("peer_purges", STATS) == {}
    assert samples_of("demoted_pages", FULL) == {(): 3.0}
    assert samples_of("peer_purges", FULL) == {("told",): 17.0, ("applied",): 18.0}
    outcomes = samples_of("page_outcomes", FULL)
    assert outcomes["peer", "load", "late"] == 9.0
    assert outcomes["object", "store", "ok"] == 16.0 and outcomes["object", "load", "ok"] == 0.0


def test_only_a_sick_tier_says_why() -> None:
    assert STATS.health_reasons() == {}
    assert FULL.health_reasons() == {"object": "the bucket answers 503"}


def test_no_write_budget_exports_none() -> None:
    limited = dataclasses.replace(STATS, write_budget_bytes=1.5)
    assert samples_of("nvme_write_budget_bytes", STATS) == {}
    assert samples_of("nvme_write_budget_bytes", limited) == {(): 1.5}


def test_server_info_names_samples_as_metrics_do() -> None:
    state = state_of(METRICS, FULL)
    assert state["tier_healthy:nvme"] == 1.0 and state["tier_healthy:object"] == 0.0
    assert state["page_outcomes:nvme:load:corrupt"] == 4.0
    assert state["host_left_pages:lost_waiting"] == 1.0
    assert state["load_duration_seconds:nvme:count"] == 2
    assert state["load_duration_seconds:nvme:sum"] == pytest.approx(0.252)
    assert state["tier_held_tokens:device"] == 3.0


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
    corrupt = {"tier": "nvme", "operation": "load", "reason": "corrupt"}
    assert value("page_outcomes_total", **corrupt) == 4
    assert value("admission_pages_total", outcome="dropped_budget") == 2
    assert value("host_left_pages_total", outcome="lost_waiting") == 1
    exporter.read_from(lambda: with_engine(num_pages_stored=1))
    assert value("stored_pages_total", tier="nvme") == 10
    assert value("page_outcomes_total", **corrupt) == 4


def test_reason_has_a_series_before_it_happens(value: Callable[..., float | None]) -> None:
    MetricsExporter(lambda: FULL, labels=RANK).export()
    for metric in METRICS:
        for source in metric.sources:
            for key in source.known:
                labels = dict(zip(metric.labels, (*source.labels, *key), strict=True))
                name = f"{metric.name}_total" if metric.kind is MetricKind.COUNTER else metric.name
                assert value(name, **labels) is not None, labels


def test_histogram_equals_what_was_recorded(value: Callable[..., float | None]) -> None:
    durations, now = Durations(), [0.0]
    took = [0.0, 0.0001, 0.00011, 0.02, 0.03, 0.03, 59.9, 60.0, 1000.0]
    exporter = MetricsExporter(
        lambda: with_engine(store_durations=durations.take()), clock=lambda: now[0], labels=RANK
    )
    for seconds in took:
        exporter.export()
        durations.record(seconds)
        now[0] += 1.0
    exporter.export()
    name = "store_duration_seconds"
    assert value(f"{name}_count", tier="nvme") == len(took)
    assert value(f"{name}_sum", tier="nvme") == pytest.approx(sum(took))
    for bound in BOUNDS_S:
        at_most = sum(seconds <= bound for seconds in took)
        assert value(f"{name}_bucket", tier="nvme", le=str(bound)) == at_most, bound

    exporter.read_from(lambda: with_engine(store_durations=timed(0.5)))  # opened again
    assert value(f"{name}_count", tier="nvme") == len(took) + 1


def test_flood_of_durations_arrives_with_one_export(value: Callable[..., float | None]) -> None:
    num = 10_000_000  # one by one they would take a minute
    flood = DurationCounts((num, *[0] * len(BOUNDS_S)), (0.1, *[0.0] * len(BOUNDS_S)))
    MetricsExporter(lambda: with_engine(verification_durations=flood), labels=RANK).export()
    name = "verification_duration_seconds"
    assert value(f"{name}_count", tier="nvme") == num
    assert value(f"{name}_sum", tier="nvme") == pytest.approx(0.1)


def test_label_of_an_operator_gives_way_to_ours(value: Callable[..., float | None]) -> None:
    MetricsExporter(lambda: STATS, labels={**RANK, "tier": "gold", "site": "a"}).export()
    assert value("tier_pages", tier="nvme", site="a") == 3
    assert value("waiting_tokens", tier="gold", site="a") == 0
