"""Timeouts and bounds of the endpoints. Times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TransferSettings"]

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """``peer_timeout_s``: silence after which a peer counts as dead (its connections show at once
    when a process ends). ``progress_timeout_s``: how long sent data may stay unanswered, or a gap
    unfilled. ``orphan_timeout_s``: how long a room may wait on prefill for its request, or its
    request for a decode rank. ``window_bytes``: bound of the data on its way to one decode rank.
    ``allowed_networks``: addresses and networks of prefill instances on other machines from which
    decode takes KV. If it is empty, decode needs keys to take KV from other machines."""

    ping_interval_s: float = 1.0
    peer_timeout_s: float = 4.0
    connect_timeout_s: float = 3.0
    progress_timeout_s: float = 10.0
    orphan_timeout_s: float = 60.0
    tombstone_s: float = 60.0
    max_orphans: int = 8192
    window_bytes: int = 64 * MiB
    num_connections: int = 1
    same_host: bool = True
    encrypt_data: bool = False
    allowed_networks: tuple[str, ...] = ()
