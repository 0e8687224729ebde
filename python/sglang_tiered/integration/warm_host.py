"""``--tier-warm-host``: after a restart, the prefixes that came back last are in host memory again.

While the server runs, prompts that were loaded back are noted on the scheduler thread, and written
every half minute, and at an ordinary stop, by a thread of their own. At the next start they are
loaded from NVMe one after the other, through the same verified prefetch as any request's, in steps
in which nothing waits: a request that comes finds at most one such load ahead of it.

Only for a scheduler that decides alone: ranks would have to note and load the same.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from sglang_tiered.integration.tenants import tenant_digest
from sglang_tiered.policy.warm_list import WarmChain, WarmList, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.integration.load_scheduling import LoadingRadixCache
    from sglang_tiered.integration.storage_backend import TieredStorage

__all__ = ["WarmHost"]

NAME = "WARM"
SAVE_INTERVAL_S = 30.0
RID_PREFIX = "sglang-tiered-warm-"

logger = logging.getLogger(__name__)


class WarmHost:
    """One per scheduler; scheduler thread, but for the thread that writes."""

    def __init__(self, cache: LoadingRadixCache, storage: TieredStorage, capacity: int) -> None:
        self._cache = cache
        self._storage = storage
        self._list = WarmList(capacity)
        self._capacity = capacity
        self._waiting = deque(decode(storage.notes.read(NAME)))
        self._loading: CacheRequestHandle | None = None
        self._num_begun = 0
        self.num_tokens_loaded = 0
        self._saver = _Saver(lambda chains: storage.notes.write(NAME, encode(chains)))
        self._num_offered = self._list.num_changes

    # ---- Noting ----

    def used(self, req: Any, chain: str, num_tokens: int, prefixes: Sequence[str]) -> None:
        """``num_tokens`` tokens of a request's prompt, which end in page ``chain``, were loaded
        back; ``prefixes`` are the last pages of the nodes before."""
        tokens = req.full_untruncated_fill_ids[:num_tokens]
        content = WarmChain(tokens.tobytes(), req.extra_key, req.cache_salt)
        self._list.used(chain, content, prefixes=prefixes)

    def purge(self, tenant: bytes | None) -> None:
        """A tenant, or None for all: neither loaded nor kept from now on."""

        def belongs(chain: WarmChain) -> bool:
            return tenant in (None, tenant_digest(chain.extra_key, chain.cache_salt))

        self._list.forget(belongs)
        self._waiting = deque(chain for chain in self._waiting if not belongs(chain))
        self._offer()

    # ---- Loading ----

    def tick(self) -> None:
        """Once per scheduling step; next to nothing unless a load is to begin or has ended."""
        if self._list.num_changes != self._num_offered and self._saver.is_due():
            self._offer()
        if self._loading is None and not self._waiting:
            return
        cache = self._cache
        if self._loading is not None:
            if cache.has_ongoing_prefetch(self._loading):
                return
            num_loaded, _ = cache.pop_prefetch_loaded_span(self._loading)
            cache.storage_prefetch_retries.cancel(self._loading.rid)
            self.num_tokens_loaded += num_loaded
            self._loading = None
            if not self._waiting:
                logger.info("host tier warmed with %d tokens", self.num_tokens_loaded)
        if self._waiting and not cache.is_loading_or_waiting():
            self._begin(self._waiting.popleft())

    def _begin(self, chain: WarmChain) -> None:
        if self.num_tokens_loaded + chain.num_tokens > self._capacity:
            self._waiting.clear()
            return
        handle = CacheRequestHandle(f"{RID_PREFIX}{self._num_begun}", 0)
        self._num_begun += 1
        self._cache.prefetch_from_storage(
            handle,
            self._cache.root_node_handle(chain.extra_key),
            chain.token_ids(),
            extra_key=chain.extra_key,
            cache_salt=chain.cache_salt,
        )
        self._cache.forget_plan(handle)
        self._loading = handle

    # ---- Writing ----

    def _offer(self) -> None:
        self._num_offered = self._list.num_changes
        self._saver.save(self._list.snapshot())

    def close(self) -> None:
        """Write what was noted last; waits for the disk, so not while requests run."""
        self._offer()
        self._saver.close()

    def tree_was_reset(self) -> None:
        """No load is under way any more; what was to be loaded stays so."""
        self._loading = None


class _Saver:
    """Writes the last list it was given, at most once per interval."""

    def __init__(self, write: Callable[[list[WarmChain]], None]) -> None:
        self._write = write
        self._lock = threading.Condition()
        self._pending: list[WarmChain] | None = None
        self._due, self._closed = True, False
        self._thread = threading.Thread(target=self._run, name="tier-warm", daemon=True)
        self._thread.start()

    def is_due(self) -> bool:
        return self._due

    def save(self, chains: list[WarmChain]) -> None:
        with self._lock:
            self._pending = chains
            self._due = False
            self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._pending is not None or self._closed)
                chains, self._pending = self._pending, None
            if chains is not None:
                with contextlib.suppress(OSError):  # a full disk: the next one may fit
                    self._write(chains)
            with self._lock:
                if self._closed and self._pending is None:
                    return
                self._lock.wait_for(lambda: self._closed, SAVE_INTERVAL_S)
                self._due = True
