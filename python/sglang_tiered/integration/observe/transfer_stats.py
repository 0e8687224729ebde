"""``TransferStats``: what ``TRANSFER_METRICS`` read, as one snapshot of one rank's endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_tiered.transfer.decode.endpoint import DecodeEndpoint
    from sglang_tiered.transfer.prefill.endpoint import PrefillEndpoint

__all__ = ["TransferStats", "manager_of", "transfer_stats"]


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counts what the endpoint of either role did since the start."""

    num_peers: int
    num_rooms: int
    num_rooms_done: int
    num_rooms_failed: int
    num_sessions_lost: int
    wire_bytes: int
    same_host_bytes: int
    num_damaged: int
    num_refused: int


def transfer_stats(endpoint: PrefillEndpoint | DecodeEndpoint) -> TransferStats:
    """Take a snapshot. Memory only, any thread."""
    stats: Any = endpoint.stats
    sends = hasattr(stats, "sent_bytes")
    return TransferStats(
        endpoint.num_sessions,
        endpoint.num_rooms,
        stats.num_rooms_sent if sends else stats.num_rooms_received,
        stats.num_rooms_failed,
        stats.num_sessions_lost,
        stats.sent_bytes if sends else stats.received_bytes,
        stats.pulled_bytes,
        stats.num_resent if sends else stats.num_damaged,
        stats.num_refused if sends else stats.num_forged,
    )


def manager_of(scheduler: Any) -> Any:
    """Return the KV manager of a scheduler process; None where it hands nothing over, or hands it
    over through another backend."""
    for queue in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        manager = getattr(getattr(scheduler, queue, None), "kv_manager", None)
        if getattr(manager, "endpoint", None) is not None:
            return manager
    return None
