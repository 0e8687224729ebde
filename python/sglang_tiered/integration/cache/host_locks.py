"""Host copies that must stay: ``HostLocks``, by what they stay for, and ``Residents``, chains that
stay for what it would cost to bring them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from sglang_tiered.policy.residents import ResidentSet

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


Reason = TypeVar("Reason")


class HostLocks(Generic[Reason]):
    """Holds at most one lock for each reason, on the scheduler thread. A locked node keeps its
    ancestors, since only leaves are evicted."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache
        self._locks: dict[Reason, tuple[int, DecLockRefParams, int]] = {}
        self.num_tokens = 0  # of all locks, as told

    def __contains__(self, reason: Reason) -> bool:
        return reason in self._locks

    def __len__(self) -> int:
        return len(self._locks)

    def __iter__(self) -> Iterator[Reason]:
        """The reasons, oldest first."""
        return iter(list(self._locks))

    def lock(self, reason: Reason, node_id: int, num_tokens: int = 0) -> None:
        """Keep the host copies up to a node, instead of what the reason kept before."""
        params = self._cache.inc_host_lock_ref(node_id).to_dec_params()
        self.unlock(reason)
        self._locks[reason] = node_id, params, num_tokens
        self.num_tokens += num_tokens

    def unlock(self, reason: Reason) -> None:
        """Let go of what a reason kept. Unknown reasons are ignored."""
        if reason in self._locks:
            node_id, params, num_tokens = self._locks.pop(reason)
            self.num_tokens -= num_tokens
            self._cache.dec_host_lock_ref(node_id, params)

    def unlock_oldest(self) -> bool:
        """Let go of what has been kept for longest; return False if nothing is."""
        if not self._locks:
            return False
        self.unlock(next(iter(self._locks)))
        return True

    def unlock_all_but(self, kept: Container[Reason] = ()) -> None:
        for reason in self:
            if reason not in kept:
                self.unlock(reason)

    def clear(self) -> None:
        """Drop all locks: the tree was emptied."""
        self._locks.clear()
        self.num_tokens = 0


class Residents:
    """``ResidentSet`` over SGLang's tree; the scheduler thread's. A chain goes by the hash of its
    last page, which a node keeps when the tree splits it.

    ``cost_of``: seconds per token to bring a chain back that ends in a node with this hash and is
    so many tokens long.
    """

    def __init__(
        self, cache: UnifiedRadixCache, capacity: int, cost_of: Callable[[int, str, int], float]
    ) -> None:
        self._core = cache.tree_core
        self._set: ResidentSet[str] = ResidentSet(capacity)
        self._cost_of = cost_of
        self._pins: HostLocks[str] = HostLocks(cache)

    @property
    def num_tokens(self) -> int:
        return self._set.num_tokens

    def offer_node(self, node_id: int) -> None:
        """Pin the chain that ends in a node, if it is to stay: the node was copied to host memory
        or loaded back."""
        if not self._core.is_backuped(node_id):
            return
        chain = self._core.get_last_hash_value(node_id)
        path = self._core.collect_path_info([node_id])[0]
        if chain is None or not path:
            return
        num_tokens = path[-1].path_end
        cost = self._cost_of(node_id, chain, num_tokens)
        hashes = [self._core.get_last_hash_value(node.node_id) for node in path[:-1]]
        beginnings = [each for each in hashes if each is not None]
        offer = self._set.offer_chain(chain, num_tokens, cost, beginnings)
        for dismissed in offer.dismissed:
            self._pins.unlock(dismissed)
        if offer.accepted:
            self._pins.lock(chain, node_id)

    def note_use(self, node_id: int) -> None:
        """Note that a chain was loaded back. A longer prompt uses the residents among its
        prefixes."""
        for node in self._core.collect_path_info([node_id])[0]:
            if self._core.get_last_hash_value(node.node_id) in self._set:
                self.offer_node(node.node_id)
        self.offer_node(node_id)

    def note_eviction(self, num_tokens: int) -> None:
        """Note that the tier evicted so many tokens of others."""
        self._set.note_eviction(num_tokens)

    def dismiss_one(self) -> bool:
        """Unpin the resident that is worth least; False if there is none."""
        chain = self._set.evict_chain()
        if chain is None:
            return False
        self._pins.unlock(chain)
        return True

    def clear(self) -> None:
        """Drop all residents: the tree was emptied."""
        self._set.clear()
        self._pins.clear()
