"""What the layered engine needs of its tiers, of its owner, and its own settings and counters."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.base import EngineStats, Health, Job, LookupResult, Run

__all__ = [
    "FAR_TIERS",
    "FarStats",
    "LayeredSettings",
    "LayeredStats",
    "LowerTier",
    "PeerSource",
    "ReadObserver",
    "Source",
    "Span",
    "Tier",
    "Unfinished",
]

MiB = 1 << 20


class Tier(enum.Enum):
    NVME = "nvme"  # the upper one, this server's own
    PEER = "peer"  # what other servers hold on theirs
    OBJECT = "object"  # the lower one


FAR_TIERS = (Tier.PEER, Tier.OBJECT)
"""Where pages that NVMe lacks may be, in the order in which they are asked by default."""


class Span(NamedTuple):
    """Consecutive pages of a prefix that come from one tier."""

    tier: Tier
    num_pages: int


class Unfinished(Protocol):
    """A purge that was begun; see ``storage.forgetting``."""

    @property
    def done(self) -> bool: ...

    def wait(self, timeout_s: float) -> bool: ...


class Source(Protocol):
    """Where pages that NVMe lacks can be read from: of ``TierEngine``, and more.

    All but ``refresh`` and ``close`` read and write memory only. A load that has not begun to serve
    a page by its deadline fails it, and touches no buffer afterwards.
    """

    @property
    def health(self) -> Health: ...

    def lookup(self, keys: Sequence[bytes]) -> LookupResult: ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]: ...

    def some_keys(self, limit: int) -> list[bytes]: ...

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job: ...

    def poll(self) -> list[Job]: ...

    def begin_purge(self, tenant: bytes | None) -> Unfinished: ...

    def set_namespace(self, namespace: bytes) -> None: ...

    def refresh(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...

    def check_integrity(self) -> None: ...


class PeerSource(Source, Protocol):
    """Other servers (``sharing.peer_tier``)."""

    def begin_purge(self, tenant: bytes | None, local: Unfinished | None = None) -> Unfinished:
        """Tell them of a purge; ``local`` is what the upper tier does of it."""

    def stats(self) -> Any: ...


class LowerTier(Source, Protocol):
    """A tier engine that several servers share (``storage.object``)."""

    def submit_store(self, run: Run) -> Job: ...

    def stats(self) -> EngineStats: ...

    def flush(self, timeout_s: float) -> bool: ...

    def hide(self, tenant: bytes | None) -> None:
        """As ``begin_purge``, for this server alone."""

    def object_stats(self) -> Any: ...


class ReadObserver(Protocol):
    """Told of every read of a tier for a caller. Any thread, at times under an engine's lock, so
    it must only note."""

    def begin_read(self, num_bytes: int, tier: Tier) -> Any: ...

    def end_read(self, reading: Any, *, is_complete: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class LayeredSettings:
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
class FarStats:
    """Pages that came from one far tier since the engine was opened."""

    num_promoted: int  # copied to NVMe after a load found them there
    num_promotions_dropped: int  # NVMe was busy or refused, or memory for copies was short
    num_recovered: int  # that a tier asked before could not serve


@dataclass(frozen=True, slots=True)
class LayeredStats(FarStats):
    """Pages that moved between NVMe and the object store, and what waits now."""

    num_demoted: int  # copied to the object store, durable
    bytes_demoted: int
    num_demotions_dropped: int  # refused for good, failed too often, or queue full
    num_demotions_gone: int  # NVMe gave them up before their turn
    demote_backlog: int  # pages that wait to be copied or are on their way
