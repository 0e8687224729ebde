"""Of sharing with other servers."""

from __future__ import annotations

from sglang_tiered.metrics.metric import Kind, Metric

__all__ = ["PEER_METRICS"]

PEER_METRICS = (
    Metric(
        "peer_healthy",
        Kind.GAUGE,
        "peer.health",
        (),
        "1 while pages of other servers are found, 0 while none are.",
    ),
    Metric(
        "peer_index_connected",
        Kind.GAUGE,
        "peer.is_connected",
        (),
        "1 while the index answers.",
    ),
    Metric("peer_servers", Kind.GAUGE, "peer.num_peers", (), "Other servers that are alive."),
    Metric(
        "peer_pages",
        Kind.GAUGE,
        "peer.num_pages_mirrored",
        (),
        "Pages they hold, as far as is known here.",
    ),
    Metric(
        "peer_load_bytes_per_s",
        Kind.GAUGE,
        "peer.load_bytes_per_s",
        (),
        "Learnt speed of a load of 16 MiB from there.",
    ),
    Metric(
        "peer_pages_loaded", Kind.COUNTER, "peer.num_fetched", (), "Pages fetched and verified."
    ),
    Metric("peer_bytes_loaded", Kind.COUNTER, "peer.bytes_fetched", (), "Payload bytes fetched."),
    Metric(
        "peer_page_failures",
        Kind.COUNTER,
        "peer.failures",
        ("reason",),
        "Pages asked for that did not come: gone there, damaged, too late, of a server with too "
        "much to do, or of one that did not answer.",
    ),
    Metric("peer_loads", Kind.COUNTER, "peer.num_loads", (), "Whole loads, and probes."),
    Metric("peer_load_seconds", Kind.COUNTER, "peer.load_s", (), "Time those took."),
    Metric(
        "peer_pages_promoted",
        Kind.COUNTER,
        "peer.num_promoted",
        (),
        "Pages loaded from there that NVMe keeps now.",
    ),
    Metric(
        "peer_promotions_dropped",
        Kind.COUNTER,
        "peer.num_promotions_dropped",
        (),
        "Pages that NVMe did not take, or had no memory for.",
    ),
    Metric(
        "peer_pages_recovered",
        Kind.COUNTER,
        "peer.num_recovered",
        (),
        "Pages that another tier could not serve and another server did.",
    ),
    Metric("peer_pages_served", Kind.COUNTER, "peer.num_served", (), "Pages given to others."),
    Metric("peer_bytes_served", Kind.COUNTER, "peer.bytes_served", (), "Payload bytes of those."),
    Metric(
        "peer_pages_refused",
        Kind.COUNTER,
        "peer.num_refused",
        (),
        "Pages others asked for while too much was on its way to them.",
    ),
    Metric(
        "peer_breaches",
        Kind.COUNTER,
        "peer.num_breaches",
        (),
        "Messages that no honest server sends.",
    ),
    Metric(
        "peer_index_errors", Kind.COUNTER, "peer.num_index_errors", (), "Failures of the index."
    ),
    Metric(
        "peer_purges",
        Kind.COUNTER,
        "peer.purges",
        ("direction",),
        "Purges told to other servers, and applied here because they told us.",
    ),
)
