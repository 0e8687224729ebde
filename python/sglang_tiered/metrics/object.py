"""Of the object tier."""

from __future__ import annotations

from sglang_tiered.metrics.metric import Kind, Metric

__all__ = ["OBJECT_METRICS"]

OBJECT_METRICS = (
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
        "Pages that another tier could not serve and the bucket did.",
    ),
)
