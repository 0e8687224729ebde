"""``TierQueries``: what SGLang and the scheduler ask the tiers of a rank, by page hashes. Any
thread, memory only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName

from sglang_tiered.integration.storage.host_pages import engine_keys
from sglang_tiered.sharing.lending import BorrowedEngine
from sglang_tiered.storage.base import REMOTE_TIERS, Health, Stop, Tier
from sglang_tiered.storage.region.engine import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.identity.namespace_search import NamespaceSearch
    from sglang_tiered.integration.storage.probing import ReadPlanner
    from sglang_tiered.storage.base import Span
    from sglang_tiered.storage.stack import TierStack


PART_S = 0.02
FIRST_PART_BYTES, MAX_PART_BYTES = 1 << 20, 64 << 20

_NO_POOL = "no pool has this name"
"""No tier holds pages of it."""


class TierQueries(HiCacheStorage):  # type: ignore[misc]
    """The part of ``TieredStorage`` that only looks."""

    def _is_never_called(self, *_: Any, **__: Any) -> Any:
        """Stand in for calls that are abstract: ``TieredController`` makes none of them."""
        raise NotImplementedError

    get = batch_get = set = batch_set = exists = _is_never_called

    _config: TieredConfig
    _search: NamespaceSearch | None
    _planner: ReadPlanner | None

    @property
    def stack(self) -> TierStack:
        """The NVMe tier, with other servers and the object tier where they are configured."""
        raise NotImplementedError

    @property
    def region_engine(self) -> RegionEngine | BorrowedEngine:
        nvme = self.stack.nvme
        assert isinstance(nvme, RegionEngine | BorrowedEngine)
        return nvme

    @property
    def knows_namespace(self) -> bool:
        """Whether pages can be loaded and stored: the weights were read."""
        return self._search is None

    def _keys(self, pool: PoolName, hashes: Sequence[str]) -> list[bytes]:
        """Return the keys of pages in the tiers; before the namespace is known they match
        nothing."""
        return engine_keys(pool if self._search is None else _NO_POOL, hashes)

    def holds(self, page_hash: str) -> bool:
        """Whether a KV page is stored here, or about to be. Other servers' pages do not count."""
        keys = self._keys(PoolName.KV, [page_hash])
        if self.region_engine.lookup(keys).stop in (Stop.END, Stop.PENDING):
            return True
        return self.stack.contains_in_bucket(keys)[0]

    def num_kept(self, hashes: Sequence[str]) -> int:
        """Count the leading KV pages that are stored. Scheduler thread."""
        keys = self._keys(PoolName.KV, hashes)
        num_hits = self.region_engine.lookup(keys).num_hits
        if self.stack.bucket is not None and num_hits < len(keys):
            above = self.region_engine.contains(keys)
            below = self.stack.contains_in_bucket(keys)
            kept = [up or down for up, down in zip(above, below, strict=True)]
            num_hits = [*kept, False].index(False)
        return num_hits

    def lookup_leading(self, hashes: Sequence[str]) -> int:
        """Count the leading KV pages that a load could serve now. Scheduler thread."""
        return self.stack.lookup(self._keys(PoolName.KV, hashes)).num_hits

    def lookup_spans(self, hashes: Sequence[str]) -> list[Span]:
        """Return the leading KV pages that a load could serve now, by tier. Scheduler thread."""
        return self.stack.lookup_spans(self._keys(PoolName.KV, hashes))

    def pages_by_tier(self, hashes: Sequence[str]) -> dict[Tier, int]:
        """Count the leading KV pages in each tier that is configured. Memory only."""
        keys = self._keys(PoolName.KV, hashes)
        shard = self.region_engine
        found = {Tier.NVME: shard.lookup(keys).num_hits}
        has = {Tier.PEER: self._config.peers, Tier.OBJECT: self._config.object}
        for tier in [tier for tier in REMOTE_TIERS if has[tier] is not None]:
            found[tier] = self.stack.remote.get(tier, shard).lookup(keys).num_hits
        return found

    def keys_of_pools(self, hashes: Sequence[str]) -> list[bytes]:
        """Return the engine keys of pages in every pool, those of KV first."""
        return [key for name in self._pool_names() for key in self._keys(name, hashes)]

    def _pool_names(self) -> list[PoolName]:
        # KV may be registered by name too.
        return list(dict.fromkeys([PoolName.KV, *getattr(self, "registered_pools", {})]))

    @property
    def part_bytes(self) -> float:
        """Return how much to read at once: what NVMe reads in ``PART_S``, and little until it was
        measured, for a request that gives up keeps the parts that have arrived. Remote tiers take
        their time for any read and serve many at once, so with them it is all that is asked
        for."""
        if self.stack.remote:
            return math.inf
        if self._planner is None:
            return MAX_PART_BYTES
        speed = self._planner.bytes_per_s
        return FIRST_PART_BYTES if speed is None else min(MAX_PART_BYTES, PART_S * speed)

    @property
    def takes_stores(self) -> bool:
        """Whether NVMe is healthy and the namespace of its pages is known."""
        return self.knows_namespace and self.region_engine.health is Health.RUNNING

    @property
    def serves_loads(self) -> bool:
        """Whether waiting for a load can still pay off."""
        return self.stack.health is Health.RUNNING
