"""Of the KV handoff between prefill and decode instances."""

from __future__ import annotations

from sglang_tiered.metrics.metric import Kind, Metric

__all__ = ["TRANSFER_METRICS"]

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
