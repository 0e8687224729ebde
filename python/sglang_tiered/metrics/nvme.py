"""Of the NVMe tier, host memory and the cost model."""

from __future__ import annotations

from sglang_tiered.metrics.metric import Kind, Metric

__all__ = ["NVME_METRICS"]

NVME_METRICS = (
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
        "nvme_regions_stuck",
        Kind.GAUGE,
        "num_regions_stuck",
        (),
        "Regions whose file cannot be removed: they serve, and their room is not given back.",
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
)
