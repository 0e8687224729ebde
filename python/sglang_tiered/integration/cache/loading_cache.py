"""What a ``LoadScheduler`` asks of the cache that it plans for, and of the loads from the back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sglang_tiered.integration.cache.host_locks import LockingCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams

    from sglang_tiered.integration.cache.planned_hits import Prefetch
    from sglang_tiered.integration.identity.tenants import PurgedTenants

__all__ = ["Backs", "LoadingCache"]


class LoadingCache(LockingCache, Protocol):
    """The part of the cache that this uses. All but the last two are SGLang's."""

    page_size: int
    prefetch_threshold: int
    tree_core: Any
    tree_components: Sequence[Any]
    components: Mapping[Any, Any]
    cache_controller: Any
    ongoing_prefetch: Mapping[CacheRequestHandle, Any]
    prefetch_loaded_tokens_by_reqid: Mapping[CacheRequestHandle, int]
    storage_prefetch_retries: Any

    def match_prefix(self, params: MatchPrefixParams) -> Any: ...

    def _drain_storage_control_queues_impl(
        self,
        n_storage_hit: int | None,
        n_ack_prefetch: int | None,
        n_backup: int | None,
        n_release: int | None,
        extra_release_counts: Mapping[Any, int] | None,
        log_metrics: bool,
    ) -> None: ...

    purged_tenants: PurgedTenants
    has_small_host: bool

    @property
    def decides_alone(self) -> bool:
        """Whether no other rank must come to the same decisions."""
        ...


class Backs(Protocol):
    """Says of which loads the back may come first."""

    def pays(self, call: Prefetch, num_held: int, ends: Sequence[int] | None) -> bool: ...
    def num_loaded(self, call: Prefetch, num_held: int) -> int: ...
    def num_ahead(self) -> int: ...
