"""Counters of the locality index."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LocalityStats"]


@dataclass(frozen=True, slots=True)
class LocalityStats:
    """Counters since opening, and current gauges. Reading them takes no I/O."""

    connected: bool  # Redis answered the latest question of the reader
    trouble: str  # why Redis does not answer or refuses a write, as one clause; or empty
    num_peers: int  # live servers whose pages are mirrored
    num_usable_peers: int  # of those, the ones at which pages are found now
    num_mirrored_pages: int  # different pages known to be held by others
    num_not_mirrored: int  # pages of live servers beyond ``max_pages``, as last seen
    mirror_bytes: int
    num_published_pages: int  # that others may find here
    num_fingerprints_published: int  # snapshots included
    num_fingerprints_read: int
    num_snapshots_published: int
    num_snapshots_read: int
    num_errors: int  # failed exchanges with Redis, connections refused included
    num_garbage: int  # values that were ignored
    num_published_anew: int  # times that Redis had lost what this server published
    num_purges_told: int  # begun here and in Redis
    num_purges_applied: int  # begun by other servers
    num_purges_waiting: int  # begun here, not yet in Redis
