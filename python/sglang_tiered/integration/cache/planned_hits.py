"""What is planned of a load: ``LoadingCache`` and ``Backs`` are asked for that, and what the tiers
hold; ``Prefetch`` and ``Planned`` describe it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_tiered.integration.cache.host_locks import LockingCache

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams

    from sglang_tiered.integration.identity.tenants import HiddenTenants
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.storage.stack.tiers import Span

__all__ = [
    "Backs",
    "LoadingCache",
    "Planned",
    "Prefetch",
    "allocate_now",
    "held_pages",
    "restorable_ends",
]


class Prefetch(NamedTuple):
    """Holds the arguments of SGLang's ``prefetch_from_storage``."""

    request: CacheRequestHandle
    last_host_node_id: int
    new_input_tokens: list[int] | array[int]
    last_hash: str | None = None
    prefix_keys: list[str] | None = None
    matched_prefix_tokens: list[int] | range | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    storage_hit_end: int | None = None

    @property
    def num_before(self) -> int:
        """Return the tokens in memory, which the new ones follow."""
        return len(self.matched_prefix_tokens or ())


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
    def pop_prefetch_loaded_span(self, request: CacheRequestHandle) -> tuple[int, int | None]: ...

    def _drain_storage_control_queues_impl(
        self,
        n_storage_hit: int | None,
        n_ack_prefetch: int | None,
        n_backup: int | None,
        n_release: int | None,
        extra_release_counts: Mapping[Any, int] | None,
        log_metrics: bool,
    ) -> None: ...

    hidden_tenants: HiddenTenants
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


class Planned(NamedTuple):
    """Describes a load that begins now."""

    call: Prefetch
    is_new: bool  # the request has just come, so this is between two steps
    hashes: Sequence[str] = ()  # of its pages, as far as the tiers hold them
    # Of a prefix that is read from its back, while its front is computed:
    num_back: int = 0  # tokens of it
    spans: Sequence[Span] = ()


def held_pages(
    cache: LoadingCache, call: Prefetch, storage: TieredStorage
) -> tuple[list[str], list[Span]]:
    """Return the leading pages that the tiers could load now, and from where. Memory only."""
    page_size = cache.page_size
    key = RadixKey(
        call.new_input_tokens,
        extra_key=call.extra_key,
        is_bigram=cache.tree_core.is_eagle,
        cache_salt=call.cache_salt,
    ).page_aligned(page_size)
    if len(key) == 0:
        return [], []
    hashes: list[str] = get_storage_hash_str(key, call.last_hash, page_size=page_size)
    spans = storage.lookup_spans(hashes)
    return hashes[: sum(span.num_pages for span in spans)], spans


def restorable_ends(
    cache: LoadingCache, node_id: int, hashes: list[str], storage: TieredStorage
) -> list[int] | None:
    """Return after how many of these pages below a node a load may end; None if after any. In a
    model with sliding windows or Mamba, states are stored at some places only."""
    num_tokens = len(hashes) * cache.page_size
    states: list[Any] = []
    for kind in cache.tree_components:
        if kind is BASE_COMPONENT_TYPE or not hashes:
            continue
        staging = cache.components[kind].prepare_prefetch(node_id, prefetch_tokens=num_tokens)
        if staging.staging_tokens:
            states += cache.tree_core.build_hicache_transfers(
                kind,
                node_id,
                CacheTransferPhase.PREFETCH,
                prefetch_tokens=num_tokens,
                staging_tokens=staging.staging_tokens,
            )
    if not states:
        return None
    # SGLang loads no state for less than a window, except of a whole prompt.
    is_root = cache.tree_core.is_root(node_id)
    shortest = 1 if is_root else max(len(state.keys) for state in states)
    ends = storage.batch_exists_v2(hashes, states).restorable_prefix_pages
    return [end for end in ends or () if end >= shortest]


def allocate_now(cache: Any) -> None:
    """Have SGLang allocate host memory for loads that were answered on the spot, so that they begin
    now and not in the next step. On a lone rank, and not in the middle of a step."""
    num_answered = cache.cache_controller.prefetch_hit_queue.qsize()
    cache._drain_storage_control_queues_impl(num_answered, 0, 0, 0, None, False)  # noqa: SLF001
