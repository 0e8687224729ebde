"""Counters advance by differences, at most once a second, and cover every outcome."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import prometheus_client

from sglang_tiered.integration.cache.load_planner import LoadPlanner
from sglang_tiered.integration.observe.exporter import MetricsExporter, samples
from sglang_tiered.integration.observe.stats import (
    HintStats,
    ObjectTierStats,
    PeerTierStats,
    PlannerStats,
    ProcessStats,
    SpillStats,
    TierReads,
)
from sglang_tiered.metrics import METRICS
from sglang_tiered.policy.admission import Outcome
from sglang_tiered.policy.cost_model import CostModel, LoadDecision
from sglang_tiered.policy.hints import HintEnd
from sglang_tiered.policy.page_accounting import PageAccounting
from sglang_tiered.sharing.peer_tier import PeerStats
from sglang_tiered.storage.base import EngineStats, Health, JobKind, Reason
from sglang_tiered.storage.object.stats import ObjectStats
from sglang_tiered.storage.stack.tiers import RemoteStats, StackStats

if TYPE_CHECKING:
    import pytest

ENGINE = EngineStats(
    health=Health.RUNNING,
    health_reason="",
    num_pages=3,
    stored_bytes=30,
    physical_bytes=4096,
    capacity_bytes=8192,
    num_pages_stored=5,
    num_pages_loaded=7,
    num_pages_evicted=2,
    bytes_stored=50,
    bytes_written=60,
    bytes_loaded=70,
    num_pages_reinserted=1,
    bytes_reinserted=10,
    num_inflight_jobs=1,
    queued_store_bytes=20,
    num_tenants=5,
    num_pages_purged=6,
    num_regions_stuck=0,
    reasons={(JobKind.LOAD, Reason.CORRUPT): 4},
)
HOST = PageAccounting(256, 64)
HOST.note_written(np.arange(64))
HOST.note_freed(np.arange(64))  # before it was stored
STATS = ProcessStats(
    nvme=ENGINE,
    host=HOST,
    spill=SpillStats(waiting_tokens=640, flight_tokens=64, num_backups_skipped=12),
    planner=PlannerStats({LoadDecision.LOAD: 128}, None, {}),
    reads=TierReads(2, 0.5, 1e9),
    admission={Outcome.ADMITTED: 6, Outcome.DROPPED_BUDGET: 2},
    write_budget_bytes=None,
    object=None,
    peer=None,
    hints=HintStats(3, {HintEnd.LOADED: 1, HintEnd.WITHDRAWN: 1, HintEnd.EXPIRED: 0}, 640),
)
BELOW = ObjectTierStats(
    engine=dataclasses.replace(
        ENGINE,
        health=Health.MISS_ONLY,
        health_reason="the bucket answers 503",
        reasons={(JobKind.STORE, Reason.OK): 16},
    ),
    bucket=ObjectStats(
        requests={"get": 19},
        num_retries=20,
        bytes_in=0,
        bytes_out=0,
        breaker="running",
        breaker_reason="",
        num_breaker_opened=0,
        num_objects=0,
        num_objects_stored=0,
        object_bytes=0,
        staged_bytes=0,
    ),
    moved=StackStats(
        num_promoted=1,
        num_promotions_dropped=2,
        num_recovered=8,
        num_demoted=3,
        bytes_demoted=4,
        num_demotions_dropped=5,
        num_demotions_gone=6,
        demote_backlog=7,
    ),
    reads=TierReads(17, 18.0),
)
BESIDE = PeerTierStats(
    tier=PeerStats(
        health=Health.RUNNING,
        health_reason="",
        is_connected=True,
        num_missed=8,
        num_late=9,
        num_purges_told=17,
        num_purges_applied=18,
    ),
    moved=RemoteStats(num_promoted=1, num_promotions_dropped=2, num_recovered=3),
    reads=TierReads(10, 11.0),
)
FULL = dataclasses.replace(STATS, object=BELOW, peer=BESIDE)


def fields(of: type[Any], prefix: str) -> set[str]:
    left_out = {"health_reason", "reads"}  # told in words; exported by tier
    return {
        f"{prefix}.{field.name}" for field in dataclasses.fields(of) if field.name not in left_out
    }


def test_no_count_of_a_tier_is_left_out() -> None:
    exported = {metric.field for metric in METRICS}
    counted = fields(EngineStats, "nvme") | fields(PlannerStats, "planner")
    counted |= fields(StackStats, "object.moved") | fields(RemoteStats, "peer.moved")
    for prefix in ("", "object.", "peer."):
        counted |= fields(TierReads, f"{prefix}reads")
    assert counted <= exported


def test_every_metric_reads_a_field_that_exists() -> None:
    """A tier that has no value for it yet gives none, but the path must be right."""
    for metric in METRICS:
        list(samples(metric, FULL))
    without_a_value = {metric.name for metric in METRICS if not list(samples(metric, FULL))}
    speeds = {"prefill_tokens_per_s", "object_load_bytes_per_s", "peer_load_bytes_per_s"}
    prices = {"prefill_price_s", "load_price_s"}
    assert without_a_value == {"nvme_write_budget_bytes", *speeds, *prices}


def test_prices_are_exported_once_learnt() -> None:
    planner = LoadPlanner[str](CostModel(page_tokens=64, bytes_per_token=1000))
    found = {
        name: samples_of(name, planner.stats()) for name in ("prefill_price_s", "load_price_s")
    }
    assert found == {"prefill_price_s": {}, "load_price_s": {}}
    planner.note_batch([(2048, 0)], 0.5)
    planner.costs.transfers[1].observe(1 << 20, 0.25)
    prefill, load = planner.costs.prefill.all_prices, planner.costs.transfers[1].prices
    assert samples_of("prefill_price_s", planner.stats()) == {
        (unit,): price
        for unit, price in zip(("batch", "token", "pair", "copied_token"), prefill, strict=True)
    }
    assert samples_of("load_price_s", planner.stats()) == {
        ("peer", "load"): load[0],
        ("peer", "byte"): load[1],
    }


def samples_of(name: str, planner: PlannerStats) -> dict[tuple[str, ...], float]:
    metric = next(metric for metric in METRICS if metric.name == name)
    return dict(samples(metric, dataclasses.replace(STATS, planner=planner)))


def test_an_object_tier_is_exported_only_if_present() -> None:
    below = [metric for metric in METRICS if metric.field.startswith("object.")]
    assert [sample for metric in below for sample in samples(metric, STATS)] == []
    found = {metric.name: list(samples(metric, FULL)) for metric in below}
    assert found["object_healthy"] == [((), 0.0)]
    assert found["object_requests"] == [(("get",), 19.0)]
    assert found["object_page_outcomes"] == [(("store", "ok"), 16.0)]
    assert found["object_pages_demoted"] == [((), 3.0)]
    assert found["object_load_bytes_per_s"] == []


def test_peers_are_exported_only_with_an_index() -> None:
    beside = [metric for metric in METRICS if metric.field.startswith("peer.")]
    assert [sample for metric in beside for sample in samples(metric, STATS)] == []
    found = {metric.name: list(samples(metric, FULL)) for metric in beside}
    assert found["peer_index_connected"] == [((), 1.0)]
    failures = {"missed": 8.0, "damaged": 0.0, "late": 9.0, "busy": 0.0, "lost": 0.0}
    assert {labels[0]: value for labels, value in found["peer_page_failures"]} == failures
    assert found["peer_purges"] == [(("told",), 17.0), (("applied",), 18.0)]


def test_only_a_sick_tier_says_why() -> None:
    assert STATS.health_reasons() == {}
    assert FULL.health_reasons() == {"object": "the bucket answers 503"}


def test_no_write_budget_exports_none() -> None:
    metric = next(metric for metric in METRICS if metric.field == "write_budget_bytes")
    limited = dataclasses.replace(STATS, write_budget_bytes=1.5)
    assert list(samples(metric, STATS)) == []
    assert list(samples(metric, limited)) == [((), 1.5)]


def test_health_is_one_only_while_running() -> None:
    metric = next(metric for metric in METRICS if metric.field == "nvme.health")
    sick = dataclasses.replace(ENGINE, health=Health.MISS_ONLY)
    assert list(samples(metric, STATS)) == [((), 1.0)]
    assert list(samples(metric, dataclasses.replace(STATS, nvme=sick))) == [((), 0.0)]


def with_pages_stored(number: int) -> ProcessStats:
    return dataclasses.replace(STATS, nvme=dataclasses.replace(ENGINE, num_pages_stored=number))


def test_counters_follow_the_engine_and_never_double(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge"):
        kind = getattr(prometheus_client, name)

        def make(*args: object, kind: type = kind, **kwargs: object) -> object:
            return kind(*args, registry=registry, **kwargs)

        monkeypatch.setattr(prometheus_client, name, make)
    now, current = [0.0], [STATS]
    exporter = MetricsExporter(lambda: current[0], clock=lambda: now[0])
    exporter.export()
    current[0] = with_pages_stored(9)
    exporter.export()  # too early: the old figure stays
    value = registry.get_sample_value
    assert value("sglang_tiered:nvme_pages_stored_total") == 5
    now[0] = 1.0
    exporter.export()
    assert value("sglang_tiered:nvme_pages_stored_total") == 9
    labels = {"operation": "load", "reason": "corrupt"}
    assert value("sglang_tiered:nvme_page_outcomes_total", labels) == 4
    assert value("sglang_tiered:nvme_admission_total", {"outcome": "dropped_budget"}) == 2
    assert value("sglang_tiered:host_pages_left_total", {"outcome": "lost_waiting"}) == 1
    opened_again = with_pages_stored(1)
    exporter.read_from(lambda: opened_again)
    exporter.export()
    assert value("sglang_tiered:nvme_pages_stored_total") == 10
