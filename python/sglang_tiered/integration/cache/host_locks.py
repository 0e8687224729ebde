"""``HostLocks``: host copies that must stay, by what they stay for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

__all__ = ["HostLocks"]

Reason = TypeVar("Reason")


class HostLocks(Generic[Reason]):
    """Holds at most one lock for each reason, on the scheduler thread. A locked node keeps its
    ancestors, since only leaves are evicted."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache
        self._locks: dict[Reason, tuple[int, DecLockRefParams]] = {}

    def __contains__(self, reason: Reason) -> bool:
        return reason in self._locks

    def __len__(self) -> int:
        return len(self._locks)

    def __iter__(self) -> Iterator[Reason]:
        """The reasons, oldest first."""
        return iter(list(self._locks))

    def lock(self, reason: Reason, node_id: int) -> None:
        """Keep the host copies up to a node, instead of what the reason kept before."""
        lock = node_id, self._cache.inc_host_lock_ref(node_id).to_dec_params()
        self.unlock(reason)
        self._locks[reason] = lock

    def unlock(self, reason: Reason) -> None:
        """Let go of what a reason kept. Unknown reasons are ignored."""
        if reason in self._locks:
            self._cache.dec_host_lock_ref(*self._locks.pop(reason))

    def unlock_all_but(self, kept: Container[Reason] = ()) -> None:
        for reason in self:
            if reason not in kept:
                self.unlock(reason)

    def clear(self) -> None:
        """Drop all locks: the tree was emptied."""
        self._locks.clear()
