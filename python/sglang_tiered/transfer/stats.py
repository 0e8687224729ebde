"""What the endpoints count since they were made. Written by the endpoint's thread only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecodeStats", "PrefillStats"]


@dataclass(slots=True)
class PrefillStats:
    """Counters since the start. Written by the endpoint's thread only."""

    sent_bytes: int = 0
    pulled_bytes: int = 0
    num_slabs: int = 0
    num_resent: int = 0
    num_rooms_sent: int = 0
    num_rooms_failed: int = 0
    num_sessions_lost: int = 0
    num_refused: int = 0


@dataclass(slots=True)
class DecodeStats:
    """Counters since the start. Written by the endpoint's thread only."""

    received_bytes: int = 0
    pulled_bytes: int = 0
    num_slabs: int = 0
    num_damaged: int = 0
    num_duplicate: int = 0
    num_late: int = 0
    num_forged: int = 0
    num_rooms_received: int = 0
    num_rooms_failed: int = 0
    num_sessions_lost: int = 0
