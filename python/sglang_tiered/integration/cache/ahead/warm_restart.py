"""``--tier-warm-host``: after a restart, the prefixes that came back last are in host memory again.

While the server runs, prompts that were loaded back are noted on the scheduler thread. A thread of
their own writes them every half minute, and at an ordinary stop. At the next start they are loaded
one after the other, a piece at a time (``chain_loader``), in steps in which nothing waits.

The file holds no keys, so what belongs to a tenant is loaded once a request names the tenant's
keys. An erasure is durable once the file no longer names the tenant.

Only for a scheduler that decides alone: ranks would have to note and load the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_tiered.errors import StoreError
from sglang_tiered.integration.cache.ahead.chain_loader import PieceOutcome, chain_of, erased_by
from sglang_tiered.integration.identity.tenants import tenant_digest
from sglang_tiered.policy.hints import LIFE_S
from sglang_tiered.policy.warm_list import WarmChain, WarmList, decode, encode
from sglang_tiered.storage.promises import ended, keep, promise
from sglang_tiered.storage.region.files import WARM_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.integration.cache.ahead.chain_loader import Chain, ChainLoader
    from sglang_tiered.integration.cache.hiding_cache import HidingCache
    from sglang_tiered.integration.cache.load_scheduler import LoadScheduler
    from sglang_tiered.storage.base import Erasure
    from sglang_tiered.storage.region.notes import Notes

__all__ = ["ColdStart", "WarmHost", "remove_list"]

SAVE_INTERVAL_S = 30.0
CLOSE_S = 10.0  # a disk that hangs ends no stop
MAX_KEYS = 4096  # of tenants, beyond which those without a prompt are dropped
REST_S = 10.0  # for calls that need an idle scheduler
LATER_S = 0.1  # between two looks at what cannot be loaded yet: each matches a prompt in the tree

logger = logging.getLogger(__name__)


def remove_list(notes: Notes) -> None:
    """Remove the list of an earlier run, which no erasure would rewrite. Waits for the disk."""
    try:
        notes.remove(WARM_NAME)
    except OSError as error:
        raise StoreError(
            f"{WARM_NAME}, which --tier-warm-host keeps in a shard of --tier-dir, cannot be "
            f"removed ({error.strerror}); delete it."
        ) from error


class _Named(NamedTuple):
    """A chain whose keys a request has named again."""

    chain: WarmChain
    extra_key: str | None
    cache_salt: str | None
    pages: Chain | None = None  # once its turn came


class ColdStart:
    """Stands in for ``WarmHost`` where nothing is loaded after a restart."""

    def __init__(self, notes: Notes) -> None:
        remove_list(notes)

    def note_loaded_back(
        self, req: Any, chain: str, num_tokens: int, prefixes: Sequence[str]
    ) -> None: ...
    def name_keys(self, extra_key: str | None, cache_salt: str | None) -> None: ...
    def tick(self) -> None: ...
    def rest(self) -> None: ...
    def tree_was_reset(self) -> None: ...
    def attached(self, notes: Notes) -> None: ...
    def close(self) -> None: ...

    def erase(self, what: Erasure) -> Future[bool]:
        """Do nothing: there is no list."""
        return ended(True)


class WarmHost:
    """Keeps the list of one scheduler. Scheduler thread; a thread of its own writes the file."""

    def __init__(
        self,
        cache: HidingCache,
        loads: LoadScheduler,
        loader: ChainLoader,
        notes: Notes,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._loads = loads
        self._loader = loader
        self._list = WarmList(capacity)
        self._capacity = capacity
        self._waiting: deque[_Named] = deque()
        self._unnamed: dict[bytes, list[WarmChain]] = {}  # by the digest of their keys
        # The keys of the chains that were noted, and of those that were named.
        self._keys: dict[bytes, tuple[str | None, str | None]] = {}
        self._pages: dict[WarmChain, Chain] = {}  # of those that the last erasure looked at
        chains = decode(notes.read(WARM_NAME))
        if not chains:
            remove_list(notes)  # damaged, or of another format
        for chain in chains:
            self._unnamed.setdefault(chain.keys, []).append(chain)
        self.name_keys(None, None)
        self._chain: Chain | None = None  # that is loaded now
        self._named: _Named | None = None  # the same, as it was kept
        self._piece_until = 0.0  # when the piece under way is late
        self._rests_until = 0.0
        self.num_tokens_loaded = 0
        self._saver = _Saver(notes)
        self._num_offered = self._list.num_changes

    # ---- Noting ----

    def note_loaded_back(
        self, req: Any, chain: str, num_tokens: int, prefixes: Sequence[str]
    ) -> None:
        """Note that ``num_tokens`` tokens of a request's prompt, which end in page ``chain``, were
        loaded back; ``prefixes`` are the last pages of the nodes before."""
        if self._cache.hidden_tenants.is_hidden(req.extra_key, req.cache_salt):
            return  # it was erased while the request, retracted since, ran
        is_eagle = self._cache.tree_core.is_eagle  # its pages are of pairs of tokens
        tokens = req.full_untruncated_fill_ids[: num_tokens + int(is_eagle)]
        extra_key = self._cache.hidden_tenants.original(req.extra_key)
        content = WarmChain(
            tokens.tobytes(),
            self._cache.hidden_tenants.tenant_of(extra_key, req.cache_salt),
            tenant_digest(extra_key, req.cache_salt),
        )
        self._keys[content.keys] = extra_key, req.cache_salt
        if len(self._keys) > MAX_KEYS:  # what none of is left
            kept = {each.keys for each in self._list.snapshot()}
            self._keys = {digest: keys for digest, keys in self._keys.items() if digest in kept}
        self._list.note_chain(chain, content, prefixes=prefixes)

    def erase(self, what: Erasure) -> Future[bool]:
        """Neither load nor keep the prompts of what is erased from now on. With any page go those
        of tenants that no request has named: their pages cannot be told. True once the file no
        longer names them."""
        is_erased = erased_by(what, self._cache)
        known, self._pages = self._pages, {}

        def is_gone(chain: WarmChain) -> bool:
            if what.keys is None:
                return what.tenant in (None, chain.tenant)
            keys = self._keys.get(chain.keys)
            if keys is None:
                return True
            if chain not in self._pages:
                pages = known.get(chain) or chain_of(self._cache, chain.token_ids(), *keys)
                self._pages[chain] = pages
            return is_erased(self._pages[chain])

        self._list.drop_chains(is_gone)
        self._waiting = deque(named for named in self._waiting if not is_gone(named.chain))
        kept = {
            keys: [chain for chain in chains if not is_gone(chain)]
            for keys, chains in self._unnamed.items()
        }
        self._unnamed = {keys: chains for keys, chains in kept.items() if chains}
        if self._chain is not None and is_erased(self._chain):
            self._loader.stop()
            self._chain = None
        is_rewritten = promise()
        self._offer(is_rewritten)
        return is_rewritten

    # ---- Loading ----

    def name_keys(self, extra_key: str | None, cache_salt: str | None) -> None:
        """Load the chains that are kept under these keys: a request goes by them."""
        if self._unnamed:
            extra_key = self._cache.hidden_tenants.original(extra_key)
            digest = tenant_digest(extra_key, cache_salt)
            chains = self._unnamed.pop(digest, ())
            if chains:
                self._keys[digest] = extra_key, cache_salt
            self._waiting += [_Named(chain, extra_key, cache_salt) for chain in chains]

    def tick(self) -> None:
        """Begin or end a load, once per scheduling step; costs next to nothing otherwise."""
        if self._list.num_changes != self._num_offered and self._saver.is_due():
            self._offer()
        loader, storage = self._loader, self._cache.storage
        if (self._chain is None and not self._waiting) or storage is None:
            return
        if loader.is_loading:
            if self._clock() >= self._piece_until:  # the tier hangs
                loader.stop()
                self._ended()
            return
        num_loaded, stop = loader.take_piece()
        self.num_tokens_loaded += num_loaded
        if stop is not None:
            self._ended()
        if self._loads.is_loading_or_waiting() or self._clock() < self._rests_until:
            return
        if self._chain is not None and self._is_hidden(self._chain):
            self._put_last()  # by another key, once its turn comes again
        if self._chain is None and self._waiting:
            self._named = self._waiting.popleft()
            self._chain = self._take(self._named)
        if self._chain is None:
            return
        end = len(self._chain.hashes) * self._cache.page_size
        outcome = loader.begin(self._chain, end, storage)
        if outcome in (PieceOutcome.NOTHING, PieceOutcome.NO_MEMORY):
            self._ended()
        elif outcome is PieceOutcome.BEGUN:
            self._piece_until = self._clock() + LIFE_S
        elif outcome is PieceOutcome.LATER:
            self._put_last()

    def rest(self) -> None:
        """Give up the piece under way, and load nothing for a while or until the tree was emptied:
        a call needs an idle scheduler."""
        if self._chain is not None:
            self._loader.stop()
        self._rests_until = self._clock() + REST_S

    def _put_last(self) -> None:
        """Go on with the other prompts, and with this one after them."""
        assert self._named is not None
        self._waiting.append(self._named._replace(pages=self._chain))
        self._chain = None
        self._rests_until = self._clock() + LATER_S

    def _is_hidden(self, chain: Chain) -> bool:
        return self._cache.hidden_tenants.is_hidden(chain.extra_key, chain.cache_salt)

    def _take(self, named: _Named) -> Chain | None:
        if named.pages is not None and not self._is_hidden(named.pages):
            return named.pages
        if self.num_tokens_loaded + named.chain.num_tokens > self._capacity:
            self._waiting.clear()
            self._unnamed.clear()
            return None
        tokens, salt = named.chain.token_ids(), named.cache_salt
        extra_key = self._cache.hidden_tenants.key_of(named.extra_key, salt)
        return chain_of(self._cache, tokens, extra_key, salt)

    def _ended(self) -> None:
        self._chain = None
        if not self._waiting:
            logger.info("host tier: loaded %d tokens of the last run", self.num_tokens_loaded)

    # ---- Writing ----

    def _offer(self, order: Future[bool] | None = None) -> None:
        self._num_offered = self._list.num_changes
        self._saver.save(self._list.snapshot(), order)

    def close(self) -> None:
        """Write what was noted last. Waits for the disk, ``CLOSE_S`` at most, so no request may
        run."""
        self._offer()
        self._saver.close()

    def attached(self, notes: Notes) -> None:
        """Keep the list in tiers that an operator attached again."""
        self._saver.write_to(notes)
        self._offer()

    def tree_was_reset(self) -> None:
        """Drop the load under way; what waits to be loaded still does."""
        self._loader.clear()
        self._chain = None
        self._rests_until = 0.0


class _Saver:
    """Writes the last list it was given, at most once per interval, but at once after erasing."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._lock = threading.Condition()
        self._pending: list[WarmChain] | None = None
        self._orders: list[Future[bool]] = []
        self._is_owed = False  # the file may name a tenant that was erased
        self._due, self._closed = True, False
        self._thread = threading.Thread(target=self._run, name="tier-warm", daemon=True)
        self._thread.start()

    def is_due(self) -> bool:
        return self._due

    def write_to(self, notes: Notes) -> None:
        """Write elsewhere from now on, as soon as there is something to write."""
        with self._lock:
            self._notes = notes

    def save(self, chains: list[WarmChain], order: Future[bool] | None = None) -> None:
        with self._lock:
            self._pending = chains
            if order is not None:
                self._orders.append(order)
            self._due = False
            self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._pending is not None or self._closed)
                chains, self._pending = self._pending, None
                orders, self._orders = self._orders, []
            if chains is not None:
                self._is_owed = self._is_owed or bool(orders)
                is_written = self._write(chains)
                for order in orders:
                    keep(order, is_written)
            with self._lock:
                if self._closed and self._pending is None:
                    return
                if self._is_owed and self._pending is None:
                    self._pending = chains  # tried again
                self._lock.wait_for(lambda: self._closed or self._orders, SAVE_INTERVAL_S)
                self._due = True

    def _write(self, chains: list[WarmChain]) -> bool:
        """Return whether the file holds this list now, or no tenant that was erased."""
        try:
            self._notes.write(WARM_NAME, encode(chains))
        except OSError:  # a full disk: the next one may fit
            if not self._is_owed:
                return False
            try:
                self._notes.remove(WARM_NAME)
            except OSError:
                return False
        self._is_owed = False
        return True
