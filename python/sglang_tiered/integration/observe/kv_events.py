"""KV events of the tiers below host memory, in SGLang's own stream and format (``README.md``).

SGLang's own recorder makes the blocks, hashes and fields from the tokens and hashes of the radix
nodes, so they equal those of its events for device and host memory. The nodes themselves are out of
reach: SGLang's tree is in Rust by default.

A page is announced when a node that holds it is stored, or is matched and loaded: the event must
carry its tokens, which are known only then. Announced pages are remembered up to a bound, those
that no tier holds any more too, as they may come back. Beyond it first these go. Then the oldest is
announced as removed, which costs a router a hit and never misleads it. Every step looks some of
them up, all in their turn. So a page lost in any way (reclaim, erasing, flaws, a sick disk) is
noticed within seconds, 20 at most, without a signal from the tiers.

With several ranks, rank 0 of each KV cache publishes, as in SGLang; its own shard decides.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_tiered.integration import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_tiered.integration.storage.backend import TieredStorage

    # Returns which keys a tier could serve now: none while it is offline. Reads memory only.
    Holds = Callable[[Sequence[bytes]], list[bool]]


logger = logging.getLogger(__name__)

MAX_PAGES = 1 << 16
"""Pages remembered; about 1 kB each with 64 tokens a page."""
MAX_PAGES_PER_TAKE = 512
"""Pages announced in a step; each takes a few microseconds of the scheduler thread."""
SWEEP_PAUSE_S, CHUNK_PAUSE_S, CHUNK_PAGES = 1.0, 0.005, 256
MAX_CHUNKS = 16
"""Chunks that a long step is followed by: as many as it took pauses, so that all of them take the
same share of the thread. More, 6 ms of it, would keep a request waiting that wakes an idle server,
which makes a step a second with ``--sleep-on-idle``."""

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


@dataclass(slots=True)
class _Page:
    """One block, with the tiers that hold it and the tiers announced for it, as bits."""

    event: BlockStored  # of this page alone, without a medium
    held: int = 0
    announced: int = 0
    end: str | None = None  # of a node's last page: its event hash, where that is not its key


@dataclass(slots=True)
class _Node:
    """The parts of a radix node that SGLang's recorder reads."""

    key: RadixKey
    parent: _Node | None
    hash_value: list[str]
    event_hash_value: list[str] | None = None


class TierEvents:
    """Announces the pages of one cache. Scheduler thread.

    ``core``: SGLang's tree core. ``tiers``: lookups by medium. ``params``: the cache's.
    """

    def __init__(
        self,
        core: Any,
        tiers: Mapping[StorageMedium, Holds],
        params: CacheInitParams,
        *,
        max_pages: int = MAX_PAGES,
        clock: Callable[[], float] = time.monotonic,
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
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()  # that a tier holds, oldest first
        self._lost: OrderedDict[bytes, _Page] = OrderedDict()  # that none does: they may come back
        self._changed: OrderedDict[bytes, _Page] = OrderedDict()  # held differs from announced
        self._clock, self._due = clock, clock()
        self._sweep: Iterator[bytes] = iter(())  # pages to look up

    @classmethod
    def of_cache(
        cls, core: Any, storage: TieredStorage, params: CacheInitParams
    ) -> TierEvents | None:
        """Create one; None unless this process publishes events."""
        return cls(core, tiers_of(storage), params) if params.enable_kv_cache_events else None

    def use_tiers(self, tiers: Mapping[StorageMedium, Holds]) -> None:
        """Ask these tiers, the same media opened again, from now on."""
        self._tiers = [(medium, 1 << at, holds) for at, (medium, holds) in enumerate(tiers.items())]

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
            last = self._pages.get(bytes.fromhex(hashes[-1]))
            end = None if last is None else last.end
            if last is not None and (end is not None or not has_own_hashes):
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
            if last is None:
                self._add(parent, [bytes.fromhex(text) for text in hashes])

    def take_events(self) -> list[Any]:
        """Return the events since the last call, of at most ``MAX_PAGES_PER_TAKE`` pages."""
        num_pages = min(len(self._changed), MAX_PAGES_PER_TAKE)
        pages = [self._changed.popitem(last=False)[1] for _ in range(num_pages)]
        # One medium after the other, so that the blocks of a chain become one event.
        for medium, bit, _ in self._tiers:
            for page in pages:
                self._announce(page, medium, bit)
        events: list[Any] = self._recorder.take()
        return events

    def tree_was_reset(self) -> None:
        """Announce everything again: SGLang has announced the removal of all blocks of every
        medium, and the tiers kept theirs."""
        for key, page in (self._changed | self._lost | self._pages).items():
            page.announced = 0
            self._changed[key] = page

    def step(self) -> None:
        """Look the next remembered pages up in every tier, if it is time for it: ``CHUNK_PAGES``,
        and more of them if it has been for long."""
        late_s = self._clock() - self._due
        if late_s < 0:
            return
        try:
            self._look(late_s)
        except Exception:
            self._due = self._clock() + SWEEP_PAUSE_S
            logger.exception("internal error in the events of tiers; routers may miss some")

    def _look(self, late_s: float) -> None:
        now = self._due + late_s
        num_pages = CHUNK_PAGES * min(1 + int(late_s / CHUNK_PAUSE_S), MAX_CHUNKS)
        keys = list(islice(self._sweep, num_pages))
        self._due = now + CHUNK_PAUSE_S
        if len(keys) < num_pages:
            self._sweep = iter([*self._lost, *self._pages])
            self._due = now + SWEEP_PAUSE_S
        for key, held in zip(keys, self._held(keys), strict=True):
            page = self._pages.get(key) or self._lost.get(key)
            if page is not None:  # else it went beyond the bound meanwhile
                self._set_held(key, page, held)

    def _held(self, keys: list[bytes]) -> list[int]:
        """Return which tiers hold each page, as bits."""
        found = [(bit, holds(keys)) for _, bit, holds in self._tiers]
        return [sum(bit for bit, answer in found if answer[at]) for at in range(len(keys))]

    def _add(self, node: _Node, keys: list[bytes]) -> None:
        held = self._held(keys)
        if not any(held):
            return
        self._recorder.record_store(node)
        blocks = [page for event in self._recorder.take() for page in _single_blocks(event)]
        assert len(blocks) == len(keys), (len(blocks), len(keys))
        for key, block, bits in zip(keys, blocks, held, strict=True):
            if bits:
                page = self._pages.get(key) or self._lost.get(key) or self._changed.get(key)
                self._set_held(key, page or _Page(block), bits)
        if node.event_hash_value is not None and (last := self._pages.get(keys[-1])) is not None:
            last.end = node.event_hash_value[-1]
        while len(self._pages) + len(self._lost) > self._max_pages:
            key, page = (self._lost or self._pages).popitem(last=False)
            page.held = 0
            self._changed[key] = page

    def _set_held(self, key: bytes, page: _Page, held: int) -> None:
        page.held = held
        if held != page.announced:
            self._changed[key] = page
        # In the order in which they were lost and come back, that of chains: a router knows no
        # page before the one in front of it.
        now, before = (self._pages, self._lost) if held else (self._lost, self._pages)
        before.pop(key, None)
        now[key] = page

    def _announce(self, page: _Page, medium: StorageMedium, bit: int) -> None:
        if page.held & bit and not page.announced & bit:
            blocks, tokens = list(page.event.block_hashes), list(page.event.token_ids)
            told = msgspec.structs.replace(
                page.event, block_hashes=blocks, token_ids=tokens, medium=medium
            )
            self._recorder.enqueue(told)  # which extends the lists of an event
            page.announced |= bit
        elif page.announced & bit and not page.held & bit:
            removed = BlockRemoved(block_hashes=list(page.event.block_hashes), medium=medium)
            self._recorder.enqueue(removed)
            page.announced &= ~bit


def tiers_of(storage: TieredStorage) -> dict[StorageMedium, Holds]:
    """Return lookups in the tiers that the storage has open."""
    tiers: dict[StorageMedium, Holds] = {StorageMedium.DISK: storage.stack.nvme.contains}
    if storage.stack.bucket is not None:
        # Other servers announce their own pages.
        tiers[StorageMedium.EXTERNAL] = storage.stack.bucket.contains
    return tiers


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
