"""What this package exports beside SGLang's own on ``/metrics``: the table, and durations.

A new metric is a counter and a row of the table, which says where it stands.
``scripts/write_tables.py`` names them in ``docs/metrics.md``. Imports nothing heavy and no other
room, so that every room may count with it.
"""

# ruff: noqa: E501
from __future__ import annotations

import enum
import threading
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

PREFIX = "sglang_tiered_"

BOUNDS_S: Final = (
    (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)
    + (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
)  # fmt: skip
"""Upper bounds of the buckets in seconds, inclusive; what took longer has a bucket of its own."""


@dataclass(frozen=True, slots=True)
class DurationCounts:
    """What was recorded so far, by bucket: one more than ``BOUNDS_S`` has bounds."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


class Durations:
    """Counts durations. Any thread; the lock is held for two additions, never across I/O, and what
    it keeps does not grow."""

    __slots__ = ("_counts", "_lock", "_sum_s")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def record(self, seconds: float) -> None:
        """Count one. A clock that went back counts as no time."""
        seconds = max(seconds, 0.0)
        bucket = bisect_left(BOUNDS_S, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self._sum_s += seconds

    def take(self) -> DurationCounts:
        """Return what was recorded since the start."""
        with self._lock:
            return DurationCounts(tuple(self._counts), self._sum_s)


class MetricKind(enum.Enum):
    """What Prometheus takes it for."""

    COUNTER = "counter"  # whose exported name ends in ``_total``, as prometheus-client adds it
    GAUGE = "gauge"
    HISTOGRAM = "histogram"  # of seconds, from ``DurationCounts``


@dataclass(frozen=True, slots=True)
class MetricSource:
    """Where a row reads some of its series. ``field`` is a dotted path of keys and attributes in
    the statistics of a process; a part of it that is missing or None gives no sample. ``labels``
    are the values of the row's first labels (the tier); those of the others are keys of the
    dictionary found there. ``known`` are such keys that have a series from the start, at zero: a
    series that appears with its first failure hides that failure from ``increase()``."""

    field: str
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric. ``labels`` are its own; every series also has those of its rank."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    sources: tuple[MetricSource, ...]
    help: str

    @property
    def full_name(self) -> str:
        """Return the name on ``/metrics``, without ``_total``."""
        return PREFIX + self.name


_Keys = tuple[tuple[str, ...], ...]


def _metric(
    name: str,
    kind: MetricKind,
    labels: str,
    fields: str | dict[str, str],
    text: str,
    known: _Keys = (),
) -> Metric:
    """Build a row. Its field is one path, or one for each value (or ``a/b`` for values) of the
    first labels. ``known`` are keys of every dictionary that a path leads to."""
    names = tuple(labels.split(", ")) if labels else ()
    sources = []
    for values, path in ({"": fields} if isinstance(fields, str) else fields).items():
        own = tuple(values.split("/")) if values else ()
        sources.append(MetricSource(path, own, known if len(own) < len(names) else ()))
    return Metric(name, kind, names, tuple(sources), text)


def _each(values: str) -> _Keys:
    return tuple((value,) for value in values.split())


COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

_STORING = {"nvme": "nvme.{}", "object": "object.engine.{}"}
_REMOTE = {"object": "object.moved.{}", "peer": "peer.moved.{}"}
_READ = {"nvme": "reads.{}", "object": "object.reads.{}", "peer": "peer.reads.{}"}
_KEPT = {tier: f"holdings.{tier}.{{}}" for tier in ("device", "host", "nvme", "object")}


def _of(paths: dict[str, str], field: str, **more: str) -> dict[str, str]:
    return {**{tier: path.format(field) for tier, path in paths.items()}, **more}


_STORED = _each("ok duplicate io_error no_space rejected over_share cancelled")
_LOADED = _each("ok miss corrupt io_error cancelled")
_ENGINE_OUTCOMES = (
    *(("store", *key) for key in _STORED),
    *(("load", *key) for key in _LOADED),
)
_NOT_FETCHED = {
    f"peer/load/{why}": f"peer.tier.num_{why}"
    for why in ["missed", "damaged", "late", "busy", "lost"]
}
_ADMISSION = _each("admitted dropped_first_touch dropped_budget dropped_backlog")
_DECISIONS = _each("absent load declined gave_up")
_LEFT = _each(
    "clean lost_waiting lost_first_touch lost_budget lost_backlog lost_failed lost_weights"
    " lost_unoffered lost_flushed lost_host_short"
)

# fmt: off
METRICS = (
    _metric("build_info", GAUGE, "version, sglang_version", "build", "Always 1; the labels say what runs."),
    # ---- What a tier is and holds ----
    _metric("tier_healthy", GAUGE, "tier", {"nvme": "nvme.health", "object": "object.engine.health", "peer": "peer.tier.health"}, "1 while the tier serves, 0 while it reports misses only."),
    _metric("tier_pages", GAUGE, "tier", _of(_STORING, "num_pages", peer="peer.tier.num_pages_mirrored"), "Pages a lookup can hit: in the bucket of any server, of peers as far as is known here."),
    _metric("tier_held_bytes", GAUGE, "tier", _of(_KEPT, "held_bytes"), "Payload bytes of what this rank's tier holds, as encoded; in the bucket of any server."),
    _metric("tier_capacity_bytes", GAUGE, "tier", _of(_KEPT, "capacity_bytes"), "Bytes that this rank's tier may take; none of a bucket without a cap."),
    _metric("tier_held_tokens", GAUGE, "tier", _of(_KEPT, "held_tokens"), "Tokens of which this tier holds the KV, or this rank's part of it."),
    _metric("tier_capacity_tokens", GAUGE, "tier", _of(_KEPT, "capacity_tokens"), "Tokens of which the tier can hold the KV, each as long as in host memory (with a codec it holds more); none of a bucket without a cap."),
    _metric("tier_physical_bytes", GAUGE, "tier", _of(_STORING, "physical_bytes"), "Bytes taken on the device, never above the capacity; in the bucket those of all pages that are known."),
    _metric("tier_inflight_jobs", GAUGE, "tier", _of(_STORING, "num_inflight_jobs", peer="peer.tier.num_inflight_jobs"), "Jobs submitted and not done."),
    _metric("tier_queued_store_bytes", GAUGE, "tier", _of(_STORING, "queued_store_bytes"), "Payload bytes of stores submitted and not done."),
    _metric("tier_tenants", GAUGE, "tier", _of(_STORING, "num_tenants"), "Tenants with pages; requests without a tenant count as one."),
    _metric("nvme_stuck_regions", GAUGE, "", "nvme.num_regions_stuck", "Regions whose file cannot be removed: they serve, and keep their space."),
    _metric("nvme_shared_bytes", GAUGE, "", "budget.total_bytes", "What the servers of --tier-machine-budget take together; only with it, as those below."),
    _metric("nvme_floor_bytes", GAUGE, "", "budget.floor_bytes", "What this rank keeps of that, however busy others are."),
    _metric("nvme_borrowed_bytes", GAUGE, "", "budget.borrowed_bytes", "What this rank may take above that now, which others may have back."),
    _metric("nvme_recalled_bytes", GAUGE, "", "budget.due_bytes", "What of that others asked for, and this rank still has."),
    _metric("nvme_write_budget_bytes", GAUGE, "", "write_budget_bytes", "What the write budget leaves for now; only with --tier-nvme-writes-per-day."),
    # ---- What went in and out ----
    _metric("stored_pages", COUNTER, "tier", _of(_STORING, "num_pages_stored"), "Pages made durable."),
    _metric("stored_bytes", COUNTER, "tier", _of(_STORING, "bytes_stored"), "Payload bytes of those, in host memory; in the bucket as encoded."),
    _metric("written_bytes", COUNTER, "tier", _of(_STORING, "bytes_written"), "Bytes written to the device, overhead included, or sent to the bucket."),
    _metric("loaded_pages", COUNTER, "tier", _of(_STORING, "num_pages_loaded", peer="peer.tier.num_fetched"), "Pages read for requests, probes included, and verified."),
    _metric("loaded_bytes", COUNTER, "tier", _of(_STORING, "bytes_loaded", peer="peer.tier.bytes_fetched"), "Payload bytes of those."),
    _metric("copied_pages", COUNTER, "tier", {"nvme": "nvme.num_pages_copied"}, "Pages read or copied for the bucket or other servers, not counted as loaded."),
    _metric("copied_bytes", COUNTER, "tier", {"nvme": "nvme.bytes_copied"}, "Bytes of those as stored."),
    _metric("copied_from_memory_pages", COUNTER, "", "nvme.num_pages_from_memory", "Of those, pages that were copied out of host memory, and not read from NVMe."),
    _metric("evicted_pages", COUNTER, "tier", _of(_STORING, "num_pages_evicted"), "Pages evicted to make room; in the bucket also those too old or no longer found."),
    _metric("purged_pages", COUNTER, "tier", _of(_STORING, "num_pages_erased"), "Pages removed by a purge."),
    _metric("reinserted_pages", COUNTER, "tier", {"nvme": "nvme.num_pages_reinserted"}, "Pages in use that were rewritten when their region was evicted."),
    _metric("reinserted_bytes", COUNTER, "tier", {"nvme": "nvme.bytes_reinserted"}, "Bytes of those as stored."),
    _metric("codec_on", GAUGE, "", "codec.is_on", "1 while pages are encoded on their way to NVMe, 0 while that is measured to cost more than it saves and NVMe is not full; only with --tier-codec."),
    _metric("codec_pages", COUNTER, "operation", {"encode": "codec.num_encoded", "decode": "codec.num_decoded"}, "Pages that were encoded, or decoded."),
    _metric("codec_page_bytes", COUNTER, "operation", {"encode": "codec.encoded_page_bytes", "decode": "codec.decoded_page_bytes"}, "Bytes of those in host memory."),
    _metric("codec_stored_bytes", COUNTER, "", "codec.encoded_bytes", "Bytes of those that were encoded, as stored."),
    _metric("codec_seconds", COUNTER, "operation", {"encode": "codec.encode_s", "decode": "codec.decode_s"}, "Time of the threads that did it."),
    _metric("page_outcomes", COUNTER, "tier, operation, reason", _of(_STORING, "reasons", **_NOT_FETCHED), "Pages by outcome: why each load or store did or did not succeed, demotion included. Of peers only failures; missed: no longer there; lost: no answer.", _ENGINE_OUTCOMES),
    _metric("admission_pages", COUNTER, "outcome", "admission", "KV pages offered to NVMe, by what admission decided.", _ADMISSION),
    # ---- What it took ----
    _metric("load_duration_seconds", HISTOGRAM, "tier", _of(_READ, "durations"), "Time of each complete read for a request, and of each probe. Reads overlap."),
    _metric("load_busy_seconds", COUNTER, "tier", _of(_READ, "busy_s"), "Time in which at least one such read was under way. Loaded bytes over it is the measured speed."),
    _metric("store_duration_seconds", HISTOGRAM, "tier", _of(_STORING, "store_durations"), "Time of each store job that made a page durable, from its submission."),
    _metric("request_wait_seconds", HISTOGRAM, "", "waits.requests", "Time from the arrival of a request at the scheduler to its admission."),
    _metric("load_wait_seconds", HISTOGRAM, "", "waits.loads", "Time from when a request could have been admitted, but for a begun load, until it was."),
    _metric("verification_duration_seconds", HISTOGRAM, "tier", {"nvme": "nvme.verification_durations"}, "Time of the checksums of one read."),
    # ---- What was decided, and why ----
    _metric("load_decision_tokens", COUNTER, "decision", "planner.load_decisions", "Prompt tokens that host memory did not hold: absent in the tiers, load (begun), declined as computing was expected to be cheaper; gave_up: no longer waited for.", _DECISIONS),
    _metric("both_ends_requests", COUNTER, "", "planner.num_both_ends", "Requests that computed their front while their back was loaded (`--tier-both-ends`)."),
    _metric("hints_begun", COUNTER, "", "hints.num_begun", "Conversations that `/tier/prefetch` began to bring to host memory."),
    _metric("hints_ended", COUNTER, "outcome", "hints.ended", "Those by their end: loaded (all that pays), withdrawn (memory was needed, or pages lost), expired.", _each("loaded withdrawn expired")),
    _metric("hinted_tokens", COUNTER, "", "hints.num_tokens_loaded", "Tokens that they brought."),
    _metric("prefill_tokens_per_second", GAUGE, "", "planner.prefill_tokens_per_s", "Estimated speed of computing a cold prompt of 2,048 tokens."),
    _metric("load_bytes_per_second", GAUGE, "tier", _of(_READ, "load_bytes_per_s"), "Estimated speed of a load of 16 MiB; of tiers that were read."),
    _metric("prefill_price_seconds", GAUGE, "unit", "planner.prefill_prices", "Learnt time of computing, per batch, token, pair of a new and an earlier token, and token copied to the device."),
    _metric("load_price_seconds", GAUGE, "tier, unit", "planner.load_prices", "Learnt time of loads, per load and per byte, of tiers that were read."),
    _metric("expected_queue_wait_seconds", GAUGE, "", "planner.queue_wait_s", "Expected time until a request that arrives now is admitted."),
    _metric("waiting_tokens", GAUGE, "", "planner.waiting_tokens", "Prompt tokens that the waiting requests are expected to compute."),
    # ---- Host memory, and the way to NVMe ----
    _metric("host_left_pages", COUNTER, "outcome", "host.left", "Pages that left host memory: clean (NVMe had them), or lost, by what caused it.", _LEFT),
    _metric("host_dirty_pages", GAUGE, "", "host.num_dirty", "Pages in host memory that NVMe does not hold."),
    _metric("spill_waiting_tokens", GAUGE, "", "spill.waiting_tokens", "Tokens that wait to be stored."),
    _metric("spill_inflight_tokens", GAUGE, "", "spill.flight_tokens", "Tokens handed to the storage thread and not yet stored."),
    _metric("host_backups_skipped", COUNTER, "", "copies.num_skipped", "Times that host memory was too short for the copy of a node."),
    _metric("host_backups_recovered", COUNTER, "", "copies.num_recovered", "Nodes among those whose copy was made later."),
    _metric("request_log_dropped", COUNTER, "", "request_log_dropped", "Lost lines of --tier-log-requests: the disk refused them, or too many waited."),
    # ---- The bucket, and other servers ----
    _metric("object_requests", COUNTER, "kind", "object.bucket.requests", "Requests to the bucket, without the retries of its library.", _each("put get list delete head")),
    _metric("object_refused", GAUGE, "kind", "object.bucket.refused", "1 while the bucket refuses such requests: without deletes it grows beyond its cap, and nothing erased goes.", _each("put delete")),
    _metric("object_listed_bytes", GAUGE, "", "object.bucket.listed_bytes", "Bytes of all pages in the bucket, by the last collection of this server; none before one."),
    _metric("promoted_pages", COUNTER, "tier", _of(_REMOTE, "num_promoted"), "Pages loaded from there and now kept on NVMe."),
    _metric("promotion_dropped_pages", COUNTER, "tier", _of(_REMOTE, "num_promotions_dropped"), "Pages that NVMe did not take, or for which memory was short."),
    _metric("recovered_pages", COUNTER, "tier", _of(_REMOTE, "num_recovered"), "Pages that another tier could not serve and this one did."),
    _metric("demoted_pages", COUNTER, "", "object.moved.num_demoted", "Pages copied from NVMe to the bucket."),
    _metric("demoted_bytes", COUNTER, "", "object.moved.bytes_demoted", "Payload bytes of those."),
    _metric("demotion_dropped_pages", COUNTER, "", "object.moved.num_demotions_dropped", "Pages that were refused, or failed too often."),
    _metric("demotion_gone_pages", COUNTER, "", "object.moved.num_demotions_gone", "Pages evicted from NVMe before they were copied."),
    _metric("demotion_backlog_pages", GAUGE, "", "object.moved.demote_backlog", "Pages on NVMe that wait to be copied to the bucket, or are on their way."),
    _metric("peer_discovery_works", GAUGE, "", "peer.tier.is_discovering", "1 while the names of other servers resolve, and the Redis that names them answers."),
    _metric("peer_servers", GAUGE, "", "peer.tier.num_peers", "Other servers that this one follows."),
    _metric("peer_servers_withheld", GAUGE, "", "peer.tier.num_peers_withheld", "Of those, servers that no page is taken from: their snapshot is not here yet, they do not answer, or they have not erased the same."),
    _metric("peer_served_pages", COUNTER, "", "peer.tier.num_served", "Pages given to others."),
    _metric("peer_served_bytes", COUNTER, "", "peer.tier.bytes_served", "Payload bytes of those."),
    _metric("peer_refused_pages", COUNTER, "", "peer.tier.num_refused", "Pages that others requested while too much was on its way to them."),
    _metric("peer_breaches", COUNTER, "", "peer.tier.num_breaches", "Messages that break the protocol."),
    _metric("peer_failures", COUNTER, "", "peer.tier.num_failures", "Connections to other servers that ended, and names that were not found."),
    _metric("peer_purges", COUNTER, "direction", {"told": "peer.tier.num_purges_told", "applied": "peer.tier.num_purges_applied"}, "Purges announced to other servers, and applied here on their request."),
)

TRANSFER_METRICS = (
    _metric("transfer_peers", GAUGE, "", "num_peers", "Sessions with ranks of the other role."),
    _metric("transfer_rooms", GAUGE, "", "num_rooms", "Requests being handed over."),
    _metric("transfer_rooms_ended", COUNTER, "outcome", {"done": "num_rooms_done", "failed": "num_rooms_failed"}, "Requests handed over, and those whose handoff failed, on either side."),
    _metric("transfer_peers_lost", COUNTER, "", "num_sessions_lost", "Sessions that ended."),
    _metric("transfer_bytes", COUNTER, "path", {"wire": "wire_bytes", "same_host": "same_host_bytes"}, "KV sent or received, or read by decode out of prefill's memory."),
    _metric("transfer_damaged_slabs", COUNTER, "", "num_damaged", "Slabs that arrived damaged, or had to be sent again."),
    _metric("transfer_refused_messages", COUNTER, "", "num_refused", "Messages of peers that are not admitted, or that are not authentic."),
)
