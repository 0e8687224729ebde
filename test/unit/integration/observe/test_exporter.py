"""Counters advance by differences, at most once a second, and cover every outcome."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import prometheus_client

from sglang_tiered.integration.observe.exporter import MetricsExporter, samples
from sglang_tiered.integration.observe.stats import ObjectTierStats, PeerTierStats, TierStats
from sglang_tiered.metrics import METRICS
from sglang_tiered.policy.admission import Outcome
from sglang_tiered.policy.cost_model import LoadDecision
from sglang_tiered.policy.page_accounting import EvictionOutcome
from sglang_tiered.storage.base import Health, JobKind, Reason

if TYPE_CHECKING:
    import pytest

STATS = TierStats(
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
    admission={Outcome.ADMITTED: 6, Outcome.DROPPED_BUDGET: 2},
    write_budget_bytes=None,
    load_decisions={LoadDecision.LOAD: 128},
    num_loads=2,
    load_s=0.5,
    prefill_tokens_per_s=None,
    load_bytes_per_s=1e9,
    host_pages_left={EvictionOutcome.CLEAN: 8, EvictionOutcome.LOST_WAITING: 3},
    num_dirty_host_pages=11,
    spill_waiting_tokens=640,
    spill_flight_tokens=64,
    num_backups_skipped=12,
    num_backups_recovered=13,
    object=None,
    peer=None,
)
BELOW = ObjectTierStats(
    num_promoted=1,
    num_promotions_dropped=2,
    num_demoted=3,
    bytes_demoted=4,
    num_demotions_dropped=5,
    num_demotions_gone=6,
    demote_backlog=7,
    num_recovered=8,
    health=Health.MISS_ONLY,
    health_reason="the bucket answers 503",
    num_pages=9,
    physical_bytes=10,
    num_pages_stored=11,
    num_pages_loaded=12,
    num_pages_evicted=13,
    bytes_written=14,
    bytes_loaded=15,
    reasons={(JobKind.STORE, Reason.OK): 16},
    num_loads=17,
    load_s=18.0,
    load_bytes_per_s=None,
    requests={"get": 19},
    num_retries=20,
)
BESIDE = PeerTierStats(
    num_promoted=1,
    num_promotions_dropped=2,
    num_recovered=3,
    health=Health.RUNNING,
    health_reason="",
    is_connected=True,
    num_peers=4,
    num_pages_mirrored=5,
    num_fetched=6,
    bytes_fetched=7,
    failures={"missed": 8, "late": 9},
    num_loads=10,
    load_s=11.0,
    load_bytes_per_s=None,
    num_served=12,
    bytes_served=13,
    num_refused=14,
    num_breaches=15,
    num_index_errors=16,
    purges={"told": 17, "applied": 18},
)


def test_every_field_of_the_statistics_is_exported() -> None:
    fields = {field.name for field in dataclasses.fields(TierStats)}
    below = {f"object.{field.name}" for field in dataclasses.fields(ObjectTierStats)}
    beside = {f"peer.{field.name}" for field in dataclasses.fields(PeerTierStats)}
    left_out = {"object", "peer", "health_reason", "object.health_reason", "peer.health_reason"}
    assert {metric.field for metric in METRICS} == (fields | below | beside) - left_out


def test_an_object_tier_is_exported_only_where_there_is_one() -> None:
    below = [metric for metric in METRICS if metric.field.startswith("object.")]
    assert [sample for metric in below for sample in samples(metric, STATS)] == []
    stats = dataclasses.replace(STATS, object=BELOW)
    found = {metric.name: list(samples(metric, stats)) for metric in below}
    assert found["object_healthy"] == [((), 0.0)]
    assert found["object_requests"] == [(("get",), 19.0)]
    assert found["object_page_outcomes"] == [(("store", "ok"), 16.0)]
    assert found["object_load_bytes_per_s"] == []
    assert all(found[name] for name in found.keys() - {"object_load_bytes_per_s"})


def test_peers_are_exported_only_where_there_is_an_index() -> None:
    beside = [metric for metric in METRICS if metric.field.startswith("peer.")]
    assert [sample for metric in beside for sample in samples(metric, STATS)] == []
    stats = dataclasses.replace(STATS, peer=BESIDE)
    found = {metric.name: list(samples(metric, stats)) for metric in beside}
    assert found["peer_index_connected"] == [((), 1.0)]
    assert found["peer_page_failures"] == [(("missed",), 8.0), (("late",), 9.0)]
    assert found["peer_purges"] == [(("told",), 17.0), (("applied",), 18.0)]
    assert all(found[name] for name in found.keys() - {"peer_load_bytes_per_s"})


def test_write_budget_is_exported_only_where_there_is_one() -> None:
    metric = next(metric for metric in METRICS if metric.field == "write_budget_bytes")
    limited = dataclasses.replace(STATS, write_budget_bytes=1.5)
    assert list(samples(metric, STATS)) == []
    assert list(samples(metric, limited)) == [((), 1.5)]


def test_health_is_one_only_while_running() -> None:
    metric = next(metric for metric in METRICS if metric.field == "health")
    sick = dataclasses.replace(STATS, health=Health.MISS_ONLY)
    assert list(samples(metric, STATS)) == [((), 1.0)]
    assert list(samples(metric, sick)) == [((), 0.0)]


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
    current[0] = dataclasses.replace(STATS, num_pages_stored=9)
    exporter.export()  # too early: the old figure stays
    value = registry.get_sample_value
    assert value("sglang_tiered:nvme_pages_stored_total") == 5
    now[0] = 1.0
    exporter.export()
    assert value("sglang_tiered:nvme_pages_stored_total") == 9
    labels = {"operation": "load", "reason": "corrupt"}
    assert value("sglang_tiered:nvme_page_outcomes_total", labels) == 4
    assert value("sglang_tiered:nvme_admission_total", {"outcome": "dropped_budget"}) == 2
    assert value("sglang_tiered:host_pages_left_total", {"outcome": "lost_waiting"}) == 3
    opened_again = dataclasses.replace(STATS, num_pages_stored=1)
    exporter.read_from(lambda: opened_again)
    exporter.export()
    assert value("sglang_tiered:nvme_pages_stored_total") == 10
