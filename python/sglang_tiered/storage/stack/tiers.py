"""Settings and counters of the stack, and what it tells of its tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sglang_tiered.storage.base import Tier

MiB = 1 << 20


REMOTE_TIERS = (Tier.PEER, Tier.OBJECT)
"""Where pages that NVMe lacks may be, in the order in which they are asked by default."""


class Span(NamedTuple):
    """Consecutive pages of a prefix that come from one tier."""

    tier: Tier
    num_pages: int


class ReadObserver(Protocol):
    """Observes every read of a tier for a caller. Any thread, at times under an engine's lock, so
    it must only note."""

    def begin_read(self, num_bytes: int, tier: Tier) -> Any: ...

    def end_read(self, reading: Any, *, is_complete: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class StackSettings:
    """Bounds of the background work.

    ``staging_bytes`` lie between the tiers while they are demoted, in batches of ``batch_bytes``;
    ``promotion_bytes`` while they are promoted. A key of the demotion queue takes about 100 bytes.
    A failed batch is tried again after ``retry_s``, four times as long each time, ``max_tries``
    times in all.
    """

    staging_bytes: int = 128 * MiB
    batch_bytes: int = 8 * MiB
    promotion_bytes: int = 64 * MiB
    max_queued_keys: int = 262_144
    max_tries: int = 5
    retry_s: float = 5.0


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Pages that came from one remote tier since the engine was opened."""

    num_promoted: int  # copied to NVMe after a load found them there
    num_promotions_dropped: int  # NVMe was busy or refused, or memory for copies was short
    num_recovered: int  # that a tier asked before could not serve


@dataclass(frozen=True, slots=True)
class StackStats(RemoteStats):
    """Pages that moved between NVMe and the bucket, and what waits now."""

    num_demoted: int  # copied to the bucket, durable
    bytes_demoted: int
    num_demotions_dropped: int  # refused for a final reason, failed too often, or queue full
    num_demotions_gone: int  # NVMe evicted them before their turn
    demote_backlog: int  # pages that wait to be copied or are on their way
