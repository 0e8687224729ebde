"""Every metric this package exports, in one table, beside SGLang's own on ``/metrics``.

Names carry the prefix ``sglang_tiered:``; counters end in ``_total`` as prometheus-client adds it.
The README's table is generated from this one (``test/meta/test_documentation.py`` compares them).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["METRICS", "TRANSFER_METRICS", "Kind", "Metric"]

PREFIX = "sglang_tiered:"


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported series. ``field`` is the attribute it is read from: of ``TierStats``, or of
    ``TransferStats`` in the second table. A part of it that is None gives no sample."""

    name: str
    kind: Kind
    field: str
    labels: tuple[str, ...]
    help: str

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


METRICS = (
    Metric("nvme_pages", Kind.GAUGE, "num_pages", (), "Pages a lookup can hit."),
    Metric("nvme_stored_bytes", Kind.GAUGE, "stored_bytes", (), "Payload bytes of those pages."),
    Metric(
        "nvme_physical_bytes",
        Kind.GAUGE,
        "physical_bytes",
        (),
        "Bytes taken on the device; never above the capacity.",
    ),
    Metric("nvme_capacity_bytes", Kind.GAUGE, "capacity_bytes", (), "The byte cap of this rank."),
    Metric(
        "nvme_healthy",
        Kind.GAUGE,
        "health",
        (),
        "1 while the tier serves, 0 while it answers misses only.",
    ),
    Metric("nvme_inflight_jobs", Kind.GAUGE, "num_inflight_jobs", (), "Jobs submitted, not done."),
    Metric(
        "nvme_queued_store_bytes",
        Kind.GAUGE,
        "queued_store_bytes",
        (),
        "Payload bytes of stores submitted, not done.",
    ),
    Metric(
        "nvme_tenants", Kind.GAUGE, "num_tenants", (), "Tenants with pages, no tenant included."
    ),
    Metric(
        "nvme_write_budget_bytes",
        Kind.GAUGE,
        "write_budget_bytes",
        (),
        "What the write budget leaves for now; only with --tier-nvme-writes-per-day.",
    ),
    Metric("nvme_pages_stored", Kind.COUNTER, "num_pages_stored", (), "Pages written."),
    Metric("nvme_pages_loaded", Kind.COUNTER, "num_pages_loaded", (), "Pages read and verified."),
    Metric(
        "nvme_pages_evicted", Kind.COUNTER, "num_pages_evicted", (), "Pages given up for space."
    ),
    Metric("nvme_pages_purged", Kind.COUNTER, "num_pages_purged", (), "Pages forgotten on order."),
    Metric("nvme_bytes_stored", Kind.COUNTER, "bytes_stored", (), "Payload bytes written."),
    Metric(
        "nvme_bytes_written",
        Kind.COUNTER,
        "bytes_written",
        (),
        "Bytes written to the device, headers and padding included.",
    ),
    Metric(
        "nvme_pages_reinserted",
        Kind.COUNTER,
        "num_pages_reinserted",
        (),
        "Pages in use that were written again when their region was given up.",
    ),
    Metric("nvme_bytes_reinserted", Kind.COUNTER, "bytes_reinserted", (), "Bytes of those."),
    Metric("nvme_bytes_loaded", Kind.COUNTER, "bytes_loaded", (), "Payload bytes read."),
    Metric(
        "nvme_page_outcomes",
        Kind.COUNTER,
        "reasons",
        ("operation", "reason"),
        "Pages by outcome: why each load or store did or did not succeed.",
    ),
    Metric(
        "nvme_admission",
        Kind.COUNTER,
        "admission",
        ("outcome",),
        "KV pages offered to the tier, by what admission decided.",
    ),
    Metric(
        "nvme_load_decisions",
        Kind.COUNTER,
        "load_decisions",
        ("decision",),
        "Prompt tokens that host memory did not hold: absent here, loaded, declined because "
        "computing was expected to be cheaper, or given up while waiting for them.",
    ),
    Metric("nvme_loads", Kind.COUNTER, "num_loads", (), "Reads for requests, and probes."),
    Metric("nvme_load_seconds", Kind.COUNTER, "load_s", (), "Time those took."),
    Metric(
        "prefill_tokens_per_s",
        Kind.GAUGE,
        "prefill_tokens_per_s",
        (),
        "Learnt speed of computing a cold prompt of 2,048 tokens.",
    ),
    Metric(
        "nvme_load_bytes_per_s",
        Kind.GAUGE,
        "load_bytes_per_s",
        (),
        "Learnt speed of a load of 16 MiB.",
    ),
    Metric(
        "host_pages_left",
        Kind.COUNTER,
        "host_pages_left",
        ("outcome",),
        "Pages that left host memory: clean (NVMe had them), or lost, by what caused it.",
    ),
    Metric(
        "host_dirty_pages",
        Kind.GAUGE,
        "num_dirty_host_pages",
        (),
        "Pages in host memory that NVMe does not hold.",
    ),
    Metric(
        "spill_waiting_tokens",
        Kind.GAUGE,
        "spill_waiting_tokens",
        (),
        "Tokens whose store waits for its turn.",
    ),
    Metric(
        "spill_inflight_tokens",
        Kind.GAUGE,
        "spill_flight_tokens",
        (),
        "Tokens whose store was handed to the storage thread.",
    ),
    Metric(
        "host_backups_skipped",
        Kind.COUNTER,
        "num_backups_skipped",
        (),
        "Times that host memory was too short for the copy of a node.",
    ),
    Metric(
        "host_backups_recovered",
        Kind.COUNTER,
        "num_backups_recovered",
        (),
        "Nodes among those whose copy was made later.",
    ),
    Metric(
        "object_healthy",
        Kind.GAUGE,
        "object.health",
        (),
        "1 while the bucket answers, 0 while the tier answers misses only.",
    ),
    Metric("object_pages", Kind.GAUGE, "object.num_pages", (), "Pages found there, of any server."),
    Metric(
        "object_physical_bytes",
        Kind.GAUGE,
        "object.physical_bytes",
        (),
        "Bytes of the objects that hold them.",
    ),
    Metric(
        "object_demote_backlog",
        Kind.GAUGE,
        "object.demote_backlog",
        (),
        "Pages on NVMe that wait to be copied there, or are on their way.",
    ),
    Metric(
        "object_load_bytes_per_s",
        Kind.GAUGE,
        "object.load_bytes_per_s",
        (),
        "Learnt speed of a load of 16 MiB from there.",
    ),
    Metric(
        "object_requests",
        Kind.COUNTER,
        "object.requests",
        ("kind",),
        "Requests to the bucket, retries included.",
    ),
    Metric("object_retries", Kind.COUNTER, "object.num_retries", (), "Requests made again."),
    Metric(
        "object_bytes_written",
        Kind.COUNTER,
        "object.bytes_written",
        (),
        "Bytes sent to the bucket.",
    ),
    Metric("object_bytes_loaded", Kind.COUNTER, "object.bytes_loaded", (), "Payload bytes read."),
    Metric(
        "object_pages_stored", Kind.COUNTER, "object.num_pages_stored", (), "Pages made durable."
    ),
    Metric(
        "object_pages_loaded",
        Kind.COUNTER,
        "object.num_pages_loaded",
        (),
        "Pages read and verified.",
    ),
    Metric(
        "object_pages_evicted",
        Kind.COUNTER,
        "object.num_pages_evicted",
        (),
        "Pages that are not found there any more: too old, or beyond the cap.",
    ),
    Metric(
        "object_page_outcomes",
        Kind.COUNTER,
        "object.reasons",
        ("operation", "reason"),
        "Pages by outcome, demotion included.",
    ),
    Metric("object_loads", Kind.COUNTER, "object.num_loads", (), "Whole reads, and probes."),
    Metric("object_load_seconds", Kind.COUNTER, "object.load_s", (), "Time those took."),
    Metric(
        "object_pages_promoted",
        Kind.COUNTER,
        "object.num_promoted",
        (),
        "Pages loaded from there that NVMe keeps now.",
    ),
    Metric(
        "object_promotions_dropped",
        Kind.COUNTER,
        "object.num_promotions_dropped",
        (),
        "Pages that NVMe did not take, or had no memory for.",
    ),
    Metric(
        "object_pages_demoted",
        Kind.COUNTER,
        "object.num_demoted",
        (),
        "Pages copied there from NVMe.",
    ),
    Metric("object_bytes_demoted", Kind.COUNTER, "object.bytes_demoted", (), "Bytes of those."),
    Metric(
        "object_demotions_dropped",
        Kind.COUNTER,
        "object.num_demotions_dropped",
        (),
        "Pages that were refused, or failed too often.",
    ),
    Metric(
        "object_demotions_gone",
        Kind.COUNTER,
        "object.num_demotions_gone",
        (),
        "Pages that left NVMe before their turn.",
    ),
    Metric(
        "object_pages_recovered",
        Kind.COUNTER,
        "object.num_recovered",
        (),
        "Pages that NVMe could not serve and the bucket did.",
    ),
)

TRANSFER_METRICS = (
    Metric("transfer_peers", Kind.GAUGE, "num_peers", (), "Sessions with ranks of the other role."),
    Metric("transfer_rooms", Kind.GAUGE, "num_rooms", (), "Requests being handed over."),
    Metric("transfer_rooms_done", Kind.COUNTER, "num_rooms_done", (), "Requests handed over."),
    Metric(
        "transfer_rooms_failed",
        Kind.COUNTER,
        "num_rooms_failed",
        (),
        "Requests given up, on either side.",
    ),
    Metric("transfer_peers_lost", Kind.COUNTER, "num_sessions_lost", (), "Sessions that ended."),
    Metric("transfer_wire_bytes", Kind.COUNTER, "wire_bytes", (), "KV sent or received."),
    Metric(
        "transfer_same_host_bytes",
        Kind.COUNTER,
        "same_host_bytes",
        (),
        "KV that decode read out of prefill's memory.",
    ),
    Metric(
        "transfer_damaged",
        Kind.COUNTER,
        "num_damaged",
        (),
        "Slabs that arrived damaged, or had to be sent again.",
    ),
    Metric(
        "transfer_refused",
        Kind.COUNTER,
        "num_refused",
        (),
        "Messages of peers that are not admitted, or that are not authentic.",
    ),
)
