"""KV events of the tiers below host memory, in SGLang's own format.

SGLang publishes what enters and leaves device memory (medium ``GPU``) and host memory
(``CPU_PINNED``) with ``--kv-events-config``, for routers of prompts. This adds ``DISK`` for the
NVMe tier and ``EXTERNAL`` for the object tier to the same stream. A ``BlockStored`` says that a
page became readable from the tier, a ``BlockRemoved`` that it no longer is. SGLang's own recorder
makes the blocks, hashes and fields from the tokens and hashes of the radix nodes, so they equal
those of the events for device and host memory. The nodes themselves are out of reach: SGLang's tree
is in Rust by default.

A page is announced when a node that holds it is stored, or is matched and loaded: the event must
carry its tokens, which are known only then. Pages that earlier processes or other servers left in a
tier are therefore announced at their first use here. Announced pages are remembered up to a bound:
beyond it the oldest is announced as removed, which costs a router a hit and never misleads it. A
thread looks the remembered pages up repeatedly. So a page lost in any way (reclaim, erasing, flaws,
a sick disk) is noticed within seconds without a signal from the tiers.

With several ranks, rank 0 of each KV cache publishes, as in SGLang; its own shard decides.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_tiered.integration import compat
from sglang_tiered.storage.base import Health

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.storage.base import TierEngine

    # Returns which keys a tier could serve now, or None while it is offline. Any thread; reads
    # memory only.
    Holds = Callable[[Sequence[bytes]], list[bool] | None]

__all__ = ["TierEvents", "tiers_of"]

MAX_PAGES = 1 << 16
"""Pages remembered; about 1 kB each with 64 tokens a page."""
MAX_PAGES_PER_TAKE = 512
"""Pages announced in a step; each takes a few microseconds of the scheduler thread."""
SWEEP_PAUSE_S, CHUNK_PAUSE_S, CHUNK_PAGES = 1.0, 0.005, 256

_EVENTS = "sglang.srt.mem_cache.events:KVCacheEventRecorder"
_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface:UnifiedTreeCoreInterface"
_FORMAT = "sglang.srt.disaggregation.kv_events"
_SIGNATURES: dict[str, tuple[str, ...]] = {
    f"{_EVENTS}.__init__": ("self", "enabled", "page_size", "dynamo_format", "lora_names"),
    f"{_EVENTS}.record_store": ("self", "node"),
    f"{_EVENTS}.enqueue": ("self", "event"),
    f"{_EVENTS}.take": ("self",),
    f"{_FORMAT}:BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "medium"),
    f"{_FORMAT}:BlockRemoved": ("block_hashes", "medium"),
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.take_events": ("self",),
    f"{_CORE}.get_hash_values": ("self", "node_id"),
    f"{_CORE}.prefetch_anchor_info": ("self", "node_id"),
    f"{_CORE}.build_storage_backup_spec": ("self", "node_id", "pass_prefix_keys"),
}

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Page:
    """One block, with the tiers that hold it and the tiers announced for it, as bits."""

    event: BlockStored  # of this page alone, without a medium
    held: int = 0
    announced: int = 0
    is_beyond: bool = False  # beyond the bound: announced as removed although held
    may_return: bool = False  # not held, because a tier is offline


@dataclass(slots=True)
class _Node:
    """The parts of a radix node that SGLang's recorder reads."""

    key: RadixKey
    parent: _Node | None
    hash_value: list[str]
    event_hash_value: list[str] | None = None


class TierEvents:
    """Announces the pages of one cache. ``announce_node``, ``take_events`` and ``tree_was_reset``
    run on the scheduler thread and wait for a short lock at most; the sweep has a thread, from
    ``start`` to ``close``.

    ``core``: SGLang's tree core. ``tiers``: lookups by medium. ``params``: the cache's.
    """

    def __init__(
        self,
        core: Any,
        tiers: Mapping[StorageMedium, Holds],
        params: CacheInitParams,
        *,
        max_pages: int = MAX_PAGES,
    ) -> None:
        compat.check_signatures(_SIGNATURES)
        self._core = core
        self._is_bigram = bool(core.is_eagle)
        self._recorder = KVCacheEventRecorder(
            enabled=True,
            page_size=params.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        self.use_tiers(tiers)
        self._max_pages = max_pages
        self._root = _Node(RadixKey([]), None, [])
        # Event hashes of nodes' last pages, where they differ from the keys of the pages.
        self._ends: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()  # guards the two below
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()
        self._changed: OrderedDict[bytes, None] = OrderedDict()  # held differs from announced
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of_cache(
        cls, core: Any, storage: TieredStorage, params: CacheInitParams
    ) -> TierEvents | None:
        """Create and start one; None unless this process publishes events."""
        if not params.enable_kv_cache_events:
            return None
        events = cls(core, tiers_of(storage), params)
        events.start()
        return events

    def use_tiers(self, tiers: Mapping[StorageMedium, Holds]) -> None:
        """Ask these tiers, the same media opened again, from the next sweep on."""
        self._tiers = [(medium, 1 << at, holds) for at, (medium, holds) in enumerate(tiers.items())]

    # ---- Scheduler thread ----

    def announce_node(self, node_id: int) -> None:
        """Announce the pages that tiers hold of the path to a node that was stored, or matched and
        loaded."""
        core = self._core
        try:
            path = core.collect_path_info([node_id])[0]
            extra_key, cache_salt = core.prefetch_anchor_info(node_id)
        except KeyError:  # evicted meanwhile
            return
        has_own_hashes = extra_key is not None or cache_salt is not None
        parent = self._root
        for node in path:
            hashes = core.get_hash_values(node.node_id)
            if not hashes:
                return
            last = bytes.fromhex(hashes[-1])
            is_known = self._is_known(last)
            end = self._ends.get(last)
            if is_known and (end is not None or not has_own_hashes):
                tokens: Sequence[int] = (0, 0)  # placeholders: the recorder does not read them
            elif (spec := core.build_storage_backup_spec(node.node_id, False)) is not None:
                tokens, end = spec.token_ids, None
            elif (held := core.snapshot_buffer_backup(node.node_id, False)) is not None:
                tokens, end = held.key.token_ids, None
            else:
                return
            key = RadixKey(
                tokens, extra_key=extra_key, cache_salt=cache_salt, is_bigram=self._is_bigram
            )
            parent = _Node(key, parent, hashes, None if end is None else [end])
            if not is_known:
                self._add(parent, [bytes.fromhex(text) for text in hashes])

    def take_events(self) -> list[Any]:
        """Return the events since the last call, of at most ``MAX_PAGES_PER_TAKE`` pages."""
        if not self._changed:
            return []
        with self._lock:
            keys = [
                self._changed.popitem(last=False)[0]
                for _ in range(min(len(self._changed), MAX_PAGES_PER_TAKE))
            ]
            pages = [self._pages[key] for key in keys]
            # One medium after the other, so that the blocks of a chain become one event.
            for medium, bit, _ in self._tiers:
                for page in pages:
                    self._announce(page, medium, bit)
            for key, page in zip(keys, pages, strict=True):
                if not page.held and not page.may_return:
                    del self._pages[key]
        events: list[Any] = self._recorder.take()
        return events

    def tree_was_reset(self) -> None:
        """Announce everything again: SGLang has announced the removal of all blocks of every
        medium, and the tiers kept theirs."""
        with self._lock:
            for key, page in self._pages.items():
                page.announced = 0
                self._changed[key] = None

    def _is_known(self, key: bytes) -> bool:
        page = self._pages.get(key)
        return page is not None and bool(page.held)

    def _add(self, node: _Node, keys: list[bytes]) -> None:
        found = [(bit, holds(keys)) for _, bit, holds in self._tiers]
        held = [
            sum(bit for bit, answer in found if answer is not None and answer[index])
            for index in range(len(keys))
        ]
        if not any(held):
            return
        self._recorder.record_store(node)
        if node.event_hash_value is not None:
            self._ends[keys[-1]] = node.event_hash_value[-1]
            if len(self._ends) > self._max_pages:
                self._ends.popitem(last=False)
        blocks = [page for event in self._recorder.take() for page in _single_blocks(event)]
        assert len(blocks) == len(keys), (len(blocks), len(keys))
        with self._lock:
            for key, block, bits in zip(keys, blocks, held, strict=True):
                if bits:
                    page = self._pages.setdefault(key, _Page(block))
                    page.is_beyond = False
                    self._set_held(key, page, bits)
            for key in list(islice(self._pages, max(0, len(self._pages) - self._max_pages))):
                page = self._pages[key]
                page.is_beyond = True
                self._set_held(key, page, 0)

    def _set_held(self, key: bytes, page: _Page, held: int, *, may_return: bool = False) -> None:
        page.held = held
        page.may_return = may_return
        if held != page.announced or not (held or may_return):
            self._changed[key] = None

    def _announce(self, page: _Page, medium: StorageMedium, bit: int) -> None:
        if page.held & bit and not page.announced & bit:
            self._recorder.enqueue(_copy(page.event, medium))
            page.announced |= bit
        elif page.announced & bit and not page.held & bit:
            removed = BlockRemoved(block_hashes=list(page.event.block_hashes), medium=medium)
            self._recorder.enqueue(removed)
            page.announced &= ~bit

    # ---- The sweep ----

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tier-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the sweep. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SWEEP_PAUSE_S):
            try:
                self.sweep(lambda: self._stop.wait(CHUNK_PAUSE_S))
            except Exception:
                logger.exception(
                    "internal error in a sweep for KV events; removed pages are announced late"
                )

    def sweep(self, pause: Callable[[], object] = lambda: None) -> None:
        """Look every remembered page up in every tier, ``CHUNK_PAGES`` at a time."""
        with self._lock:
            keys = list(self._pages)
        for start in range(0, len(keys), CHUNK_PAGES):
            if start:
                pause()
            chunk = keys[start : start + CHUNK_PAGES]
            found = [(bit, holds(chunk)) for _, bit, holds in self._tiers]
            may_return = any(held is None for _, held in found)
            with self._lock:
                for index, key in enumerate(chunk):
                    page = self._pages.get(key)
                    if page is None or page.is_beyond:
                        continue
                    bits = sum(bit for bit, held in found if held is not None and held[index])
                    self._set_held(key, page, bits, may_return=may_return)


def tiers_of(storage: TieredStorage) -> dict[StorageMedium, Holds]:
    """Return lookups in the tiers that the storage has open."""
    tiers = {StorageMedium.DISK: _holds_in(storage.stack.nvme)}
    if storage.stack.bucket is not None:
        # Other servers announce their own pages.
        tiers[StorageMedium.EXTERNAL] = _holds_in(storage.stack.bucket)
    return tiers


def _holds_in(engine: TierEngine) -> Holds:
    def holds(keys: Sequence[bytes]) -> list[bool] | None:
        held = engine.contains(keys)
        # Asked afterwards: one that is offline keeps its pages, and may come back.
        return held if engine.health is Health.RUNNING else None

    return holds


def _single_blocks(event: BlockStored) -> list[BlockStored]:
    """Split an event of the recorder into one event per block."""
    size = event.block_size
    parents = [event.parent_block_hash, *event.block_hashes[:-1]]
    return [
        msgspec.structs.replace(
            event,
            block_hashes=[block],
            parent_block_hash=parent,
            token_ids=event.token_ids[at * size : (at + 1) * size],
            medium=None,
        )
        for at, (block, parent) in enumerate(zip(event.block_hashes, parents, strict=True))
    ]


def _copy(event: BlockStored, medium: StorageMedium) -> BlockStored:
    """Return a copy with lists of its own: the recorder extends those of an event."""
    return msgspec.structs.replace(
        event,
        block_hashes=list(event.block_hashes),
        token_ids=list(event.token_ids),
        medium=medium,
    )
