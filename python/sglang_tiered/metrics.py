"""Every metric this package exports, in one table, beside SGLang's own on ``/metrics``.

A new metric is a counter, a field of a stats object, and a row here. ``scripts/write_tables.py``
writes the tables of the documents.
"""

# ruff: noqa: E501
from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["METRICS", "PREFIX", "TRANSFER_METRICS", "Kind", "Metric"]

PREFIX = "sglang_tiered:"


class Kind(enum.Enum):
    """What Prometheus takes it for."""

    COUNTER = "counter"  # whose exported name ends in ``_total``, as prometheus-client adds it
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported series. ``field`` is a dotted path to an attribute of ``ProcessStats``, or of
    ``TransferStats`` in the second table. A part of it that is None gives no sample."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    field: str
    help: str

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _metrics(*rows: tuple[str, Kind, str, str, str]) -> tuple[Metric, ...]:
    return tuple(
        Metric(name, kind, tuple(labels.split(", ")) if labels else (), field, text)
        for name, kind, labels, field, text in rows
    )


COUNTER, GAUGE = Kind.COUNTER, Kind.GAUGE

# fmt: off
METRICS = _metrics(
    ("nvme_pages", GAUGE, "", "nvme.num_pages", "Pages a lookup can hit."),
    ("nvme_stored_bytes", GAUGE, "", "nvme.stored_bytes", "Payload bytes of those pages."),
    ("nvme_physical_bytes", GAUGE, "", "nvme.physical_bytes", "Bytes taken on the device; never above the capacity."),
    ("nvme_capacity_bytes", GAUGE, "", "nvme.capacity_bytes", "The byte cap of this rank."),
    ("nvme_healthy", GAUGE, "", "nvme.health", "1 while the tier serves, 0 while it reports misses only."),
    ("nvme_inflight_jobs", GAUGE, "", "nvme.num_inflight_jobs", "Jobs submitted and not done."),
    ("nvme_queued_store_bytes", GAUGE, "", "nvme.queued_store_bytes", "Payload bytes of stores submitted and not done."),
    ("nvme_tenants", GAUGE, "", "nvme.num_tenants", "Tenants with pages; requests without a tenant count as one."),
    ("nvme_regions_stuck", GAUGE, "", "nvme.num_regions_stuck", "Regions whose file cannot be removed: they serve, and keep their space."),
    ("nvme_write_budget_bytes", GAUGE, "", "write_budget_bytes", "What the write budget leaves for now; only with --tier-nvme-writes-per-day."),
    ("nvme_pages_stored", COUNTER, "", "nvme.num_pages_stored", "Pages written."),
    ("nvme_pages_loaded", COUNTER, "", "nvme.num_pages_loaded", "Pages read and verified."),
    ("nvme_pages_evicted", COUNTER, "", "nvme.num_pages_evicted", "Pages evicted to make room."),
    ("nvme_pages_purged", COUNTER, "", "nvme.num_pages_purged", "Pages removed by a purge."),
    ("nvme_bytes_stored", COUNTER, "", "nvme.bytes_stored", "Payload bytes written."),
    ("nvme_bytes_written", COUNTER, "", "nvme.bytes_written", "Bytes written to the device, headers and padding included."),
    ("nvme_pages_reinserted", COUNTER, "", "nvme.num_pages_reinserted", "Pages in use that were rewritten when their region was evicted."),
    ("nvme_bytes_reinserted", COUNTER, "", "nvme.bytes_reinserted", "Bytes of those."),
    ("nvme_bytes_loaded", COUNTER, "", "nvme.bytes_loaded", "Payload bytes read."),
    ("nvme_page_outcomes", COUNTER, "operation, reason", "nvme.reasons", "Pages by outcome: why each load or store did or did not succeed."),
    ("nvme_admission", COUNTER, "outcome", "admission", "KV pages offered to the tier, by what admission decided."),
    ("both_ends_requests", COUNTER, "", "planner.num_both_ends", "Requests that computed the front of their prefix while its back was loaded (`--tier-both-ends`)."),
    ("hints_begun", COUNTER, "", "hints.num_begun", "Conversations that `/tier/prefetch` began to bring to host memory."),
    ("hints_ended", COUNTER, "outcome", "hints.ended", "Those by their end: loaded (all that pays), withdrawn (memory was needed, a read failed, or its pages are no more), expired."),
    ("hinted_tokens", COUNTER, "", "hints.num_tokens_loaded", "Tokens that they brought."),
    ("nvme_load_decisions", COUNTER, "decision", "planner.load_decisions", "Prompt tokens that host memory did not hold: absent here, loaded, declined because computing was expected to be cheaper, or abandoned while waiting for them."),
    ("nvme_loads", COUNTER, "", "reads.num_loads", "Reads for requests, and probes."),
    ("nvme_load_seconds", COUNTER, "", "reads.load_s", "Time those took."),
    ("prefill_tokens_per_s", GAUGE, "", "planner.prefill_tokens_per_s", "Estimated speed of computing a cold prompt of 2,048 tokens."),
    ("nvme_load_bytes_per_s", GAUGE, "", "reads.load_bytes_per_s", "Estimated speed of a load of 16 MiB."),
    ("prefill_price_s", GAUGE, "unit", "planner.prefill_prices", "Learnt seconds of computing, per batch, token, pair of a new token and one before it, and token copied to the device."),
    ("load_price_s", GAUGE, "tier, unit", "planner.load_prices", "Learnt seconds of loads, per load and per byte, of tiers that were read."),
    ("queue_wait_s", GAUGE, "", "planner.queue_wait_s", "Expected time until a request that arrives now is admitted."),
    ("waiting_tokens", GAUGE, "", "planner.waiting_tokens", "Prompt tokens that the waiting requests are expected to compute."),
    ("host_pages_left", COUNTER, "outcome", "host.left", "Pages that left host memory: clean (NVMe had them), or lost, by what caused it."),
    ("host_dirty_pages", GAUGE, "", "host.num_dirty", "Pages in host memory that NVMe does not hold."),
    ("spill_waiting_tokens", GAUGE, "", "spill.waiting_tokens", "Tokens that wait to be stored."),
    ("spill_inflight_tokens", GAUGE, "", "spill.flight_tokens", "Tokens handed to the storage thread and not yet stored."),
    ("host_backups_skipped", COUNTER, "", "spill.num_backups_skipped", "Times that host memory was too short for the copy of a node."),
    ("host_backups_recovered", COUNTER, "", "spill.num_backups_recovered", "Nodes among those whose copy was made later."),
    ("object_healthy", GAUGE, "", "object.engine.health", "1 while the bucket answers, 0 while the tier reports misses only."),
    ("object_pages", GAUGE, "", "object.engine.num_pages", "Pages found there, of any server."),
    ("object_physical_bytes", GAUGE, "", "object.engine.physical_bytes", "Bytes of the objects that hold them."),
    ("object_demote_backlog", GAUGE, "", "object.moved.demote_backlog", "Pages on NVMe that wait to be copied there, or are on their way."),
    ("object_load_bytes_per_s", GAUGE, "", "object.reads.load_bytes_per_s", "Estimated speed of a load of 16 MiB from there."),
    ("object_requests", COUNTER, "kind", "object.bucket.requests", "Requests to the bucket, retries included."),
    ("object_retries", COUNTER, "", "object.bucket.num_retries", "Requests made again."),
    ("object_bytes_written", COUNTER, "", "object.engine.bytes_written", "Bytes sent to the bucket."),
    ("object_bytes_loaded", COUNTER, "", "object.engine.bytes_loaded", "Payload bytes read."),
    ("object_pages_stored", COUNTER, "", "object.engine.num_pages_stored", "Pages made durable."),
    ("object_pages_loaded", COUNTER, "", "object.engine.num_pages_loaded", "Pages read and verified."),
    ("object_pages_evicted", COUNTER, "", "object.engine.num_pages_evicted", "Pages no longer found there: too old, or beyond the cap."),
    ("object_page_outcomes", COUNTER, "operation, reason", "object.engine.reasons", "Pages by outcome, demotion included."),
    ("object_loads", COUNTER, "", "object.reads.num_loads", "Whole reads, and probes."),
    ("object_load_seconds", COUNTER, "", "object.reads.load_s", "Time those took."),
    ("object_pages_promoted", COUNTER, "", "object.moved.num_promoted", "Pages loaded from there and now kept on NVMe."),
    ("object_promotions_dropped", COUNTER, "", "object.moved.num_promotions_dropped", "Pages that NVMe did not take, or for which memory was short."),
    ("object_pages_demoted", COUNTER, "", "object.moved.num_demoted", "Pages copied there from NVMe."),
    ("object_bytes_demoted", COUNTER, "", "object.moved.bytes_demoted", "Bytes of those."),
    ("object_demotions_dropped", COUNTER, "", "object.moved.num_demotions_dropped", "Pages that were refused, or failed too often."),
    ("object_demotions_gone", COUNTER, "", "object.moved.num_demotions_gone", "Pages evicted from NVMe before they were copied."),
    ("object_pages_recovered", COUNTER, "", "object.moved.num_recovered", "Pages that another tier could not serve and the bucket did."),
    ("peer_healthy", GAUGE, "", "peer.tier.health", "1 while pages of other servers are found, 0 while the tier reports misses only."),
    ("peer_index_connected", GAUGE, "", "peer.tier.is_connected", "1 while the index answers."),
    ("peer_servers", GAUGE, "", "peer.tier.num_peers", "Other servers that are alive."),
    ("peer_pages", GAUGE, "", "peer.tier.num_pages_mirrored", "Pages they hold, as far as is known here."),
    ("peer_load_bytes_per_s", GAUGE, "", "peer.reads.load_bytes_per_s", "Estimated speed of a load of 16 MiB from there."),
    ("peer_pages_loaded", COUNTER, "", "peer.tier.num_fetched", "Pages fetched and verified."),
    ("peer_bytes_loaded", COUNTER, "", "peer.tier.bytes_fetched", "Payload bytes fetched."),
    ("peer_page_failures", COUNTER, "reason", "peer.failures", "Pages requested and not received: no longer there, damaged, too late, of a server that is busy, or of one that did not answer."),
    ("peer_loads", COUNTER, "", "peer.reads.num_loads", "Whole loads, and probes."),
    ("peer_load_seconds", COUNTER, "", "peer.reads.load_s", "Time those took."),
    ("peer_pages_promoted", COUNTER, "", "peer.moved.num_promoted", "Pages loaded from there and now kept on NVMe."),
    ("peer_promotions_dropped", COUNTER, "", "peer.moved.num_promotions_dropped", "Pages that NVMe did not take, or for which memory was short."),
    ("peer_pages_recovered", COUNTER, "", "peer.moved.num_recovered", "Pages that another tier could not serve and another server did."),
    ("peer_pages_served", COUNTER, "", "peer.tier.num_served", "Pages given to others."),
    ("peer_bytes_served", COUNTER, "", "peer.tier.bytes_served", "Payload bytes of those."),
    ("peer_pages_refused", COUNTER, "", "peer.tier.num_refused", "Pages that others requested while too much was on its way to them."),
    ("peer_breaches", COUNTER, "", "peer.tier.num_breaches", "Messages that break the protocol."),
    ("peer_index_errors", COUNTER, "", "peer.tier.num_index_errors", "Failures of the index."),
    ("peer_purges", COUNTER, "direction", "peer.purges", "Purges announced to other servers, and applied here on their request."),
)

TRANSFER_METRICS = _metrics(
    ("transfer_peers", GAUGE, "", "num_peers", "Sessions with ranks of the other role."),
    ("transfer_rooms", GAUGE, "", "num_rooms", "Requests being handed over."),
    ("transfer_rooms_done", COUNTER, "", "num_rooms_done", "Requests handed over."),
    ("transfer_rooms_failed", COUNTER, "", "num_rooms_failed", "Requests whose handoff failed, on either side."),
    ("transfer_peers_lost", COUNTER, "", "num_sessions_lost", "Sessions that ended."),
    ("transfer_wire_bytes", COUNTER, "", "wire_bytes", "KV sent or received."),
    ("transfer_same_host_bytes", COUNTER, "", "same_host_bytes", "KV that decode read out of prefill's memory."),
    ("transfer_damaged", COUNTER, "", "num_damaged", "Slabs that arrived damaged, or had to be sent again."),
    ("transfer_refused", COUNTER, "", "num_refused", "Messages of peers that are not admitted, or that are not authentic."),
)
