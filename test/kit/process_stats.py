"""Statistics of one scheduler process, with and without a bucket and other servers."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from sglang_tiered.integration.cache.hints import HintEnd
from sglang_tiered.integration.cache.load_planner import LoadPlanner
from sglang_tiered.integration.storage.machine_budget import BudgetStats
from sglang_tiered.metrics import DurationCounts, Durations
from sglang_tiered.policy.admission import Outcome, PageAccounting
from sglang_tiered.policy.cost_model import CostModel, LoadDecision
from sglang_tiered.policy.spill import SpillQueue
from sglang_tiered.sharing.peer_tier import PeerStats
from sglang_tiered.storage.base import Health, JobKind, Reason, TierStats
from sglang_tiered.storage.bucket.engine import BucketStats
from sglang_tiered.storage.encoding import EncodingStats
from sglang_tiered.storage.stack.tier_stack import RemoteStats, StackStats


def timed(*seconds: float) -> DurationCounts:
    durations = Durations()
    for each in seconds:
        durations.record(each)
    return durations.take()


ENGINE = TierStats(
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
    num_pages_copied=8,
    bytes_copied=80,
    num_pages_from_memory=2,
    num_pages_reinserted=1,
    bytes_reinserted=10,
    num_inflight_jobs=1,
    queued_store_bytes=20,
    num_tenants=5,
    num_pages_erased=6,
    num_regions_stuck=0,
    reasons={(JobKind.LOAD, Reason.CORRUPT): 4},
    store_durations=timed(0.01),
    verification_durations=timed(0.0002),
)
HOST = PageAccounting(256, 64)
HOST.note_written(np.arange(64))
HOST.note_freed(np.arange(64))  # before it was stored
PLANNER: LoadPlanner[Any] = LoadPlanner(CostModel(page_tokens=64, bytes_per_token=1024))
STATS: dict[str, Any] = {
    "build": {("1", "2"): 1},
    "nvme": ENGINE,
    "host": HOST,
    "spill": SpillQueue(64, time.monotonic),
    "copies": {"num_skipped": 12, "num_recovered": 0},
    "planner": {**PLANNER.stats(), "load_decisions": {LoadDecision.LOAD: 128}},
    "reads": {"durations": timed(0.002, 0.25), "busy_s": 0.5, "load_bytes_per_s": 1e9},
    "admission": {Outcome.ADMITTED: 6, Outcome.DROPPED_BUDGET: 2},
    "write_budget_bytes": None,
    "waits": {"requests": timed(0.05), "loads": timed(0.0)},
    "holdings": {
        tier: {"capacity_bytes": 8192, "capacity_tokens": 64, "held_bytes": 30, "held_tokens": 3}
        for tier in ("device", "host", "nvme")
    },
    "hints": {
        "num_begun": 3,
        "ended": {HintEnd.LOADED: 1, HintEnd.WITHDRAWN: 1, HintEnd.EXPIRED: 0},
        "num_tokens_loaded": 640,
    },
    "budget": BudgetStats(total_bytes=16384, floor_bytes=2048, borrowed_bytes=6144, due_bytes=0),
    "request_log_dropped": 2,
}
BELOW = {
    "engine": dataclasses.replace(
        ENGINE,
        health=Health.MISS_ONLY,
        health_reason="the bucket answers 503",
        reasons={(JobKind.STORE, Reason.OK): 16},
    ),
    "bucket": BucketStats(
        requests={"get": 19},
        refused={"put": 0, "delete": 0},
        listed_bytes=20,
        trouble="",
    ),
    "moved": StackStats(
        num_promoted=1,
        num_promotions_dropped=2,
        num_recovered=8,
        num_demoted=3,
        bytes_demoted=4,
        num_demotions_dropped=5,
        num_demotions_gone=6,
        demote_backlog=7,
    ),
    "reads": {"durations": timed(2.0), "busy_s": 18.0, "load_bytes_per_s": None},
}
BESIDE = {
    "tier": PeerStats(
        health=Health.RUNNING,
        health_reason="",
        is_discovering=True,
        num_missed=8,
        num_late=9,
        num_purges_told=17,
        num_purges_applied=18,
    ),
    "moved": RemoteStats(num_promoted=1, num_promotions_dropped=2, num_recovered=3),
    "reads": {"durations": timed(0.5), "busy_s": 11.0, "load_bytes_per_s": None},
}
CODEC = EncodingStats(True, 4, 400, 300, 0.5, 3, 250, 0.25)
FULL = {**STATS, "object": BELOW, "peer": BESIDE, "codec": CODEC}


def with_engine(**changed: object) -> dict[str, Any]:
    return {**STATS, "nvme": dataclasses.replace(ENGINE, **changed)}  # type: ignore[arg-type]
