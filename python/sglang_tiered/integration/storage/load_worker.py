"""``LoadWorker``: several loads under way on SGLang's prefetch I/O thread, which waits for none."""

from __future__ import annotations

import logging
from collections import deque
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.cache_controller import PrefetchAck
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, PoolName, count_pool_hits
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.storage.base import Job


logger = logging.getLogger(__name__)

NUM_PARTS = 2
"""Full parts under way: one that is waited for, and one that keeps the disk busy meanwhile."""


class LoadOperation(PrefetchOperation):  # type: ignore[misc]
    """SGLang's record of a load, and how far it has come. ``tenant``: of pages that a remote tier
    serves, to keep them on NVMe; None: they are not kept."""

    def __init__(self, *arguments: Any, tenant: bytes | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.tenant = tenant
        self.num_begun = 0  # pages of KV
        self.parts: deque[_LoadedPart] = deque()  # begun, and SGLang was not told of their end
        self.num_arrived = 0  # leading pages, of KV and the pools that share its indices
        self.num_batches = 0  # of which SGLang was told
        self.is_cut = False  # nothing more of its KV can be begun
        self.has_failed = False  # what follows is of no use
        self.has_states = False  # begun, or out of reach

    @property
    def goes_on(self) -> bool:
        """Whether more of its KV is to be read."""
        is_begun = self.is_cut or self.has_failed or self.num_begun >= len(self.hash_value)
        return not is_begun and not self.is_terminated()


class _LoadedPart:
    """Pages of one load that are read at once: of KV up to page ``end``, into ``slots``, or (0) of
    other pools."""

    def __init__(
        self, load: LoadOperation, num_pages: int, end: int, slots: torch.Tensor | None = None
    ) -> None:
        self.load, self.num_pages, self.end, self.slots = load, num_pages, end, slots
        self.is_whole = True  # all of its jobs could begin
        self.jobs: dict[PoolName, Job] = {}
        self.num_left = 0  # jobs that have not ended

    @property
    def hits(self) -> dict[str, int]:
        """Return how many leading pages of each pool have arrived."""
        found: dict[str, int] = count_pool_hits({name: job.ok for name, job in self.jobs.items()})
        return found

    @property
    def num_arrived(self) -> int:
        """Return how many leading pages of KV are of use."""
        return min(self.hits.values()) if self.num_pages and self.is_whole else 0


class LoadWorker:
    """Carries out the loads of one controller on its I/O thread, until that is told to stop.

    SGLang's thread asks for up to 128 pages, waits for them, tells the scheduler, and asks for the
    next. Between two calls the disk is idle, and 128 pages of a large model are a gigabyte, within
    which no abort is noticed. Here all that happens comes through the controller's queue: loads,
    and jobs that have ended. KV is read in parts of the size that the tiers name. When one ends the
    next begins, of this load or of those behind it, as far as ``NUM_PARTS`` reach.

    SGLang is told as by its own thread, which ranks compare: of each batch of a load, of its other
    pools, and of its end, one load after the other. A lone rank hears of each part besides, so that
    a request which waits no longer keeps what has arrived. Not so with other pools, whose pages
    count once all are there. SGLang gives the pages of an aborted load back at its end, which is
    told when nothing of it is being read; ``run`` returns only when nothing is."""

    def __init__(self, controller: Any, tiers: TieredStorage) -> None:
        self._controller, self._tiers = controller, tiers
        self._page_bytes = cache(tiers.page_bytes)  # at first use: the tiers open late
        self._queue = controller.prefetch_buffer
        self._is_alone = not controller.prefetch_completion_sync_groups
        # Nobody else must come to the same numbers of a lone rank.
        self._acks = (
            controller.ack_prefetch_queue if self._is_alone else controller.prefetch_sync_queue
        )
        self._loads: deque[LoadOperation] = deque()  # whose end SGLang was not told of
        self._to_begin: deque[LoadOperation] = deque()  # of these
        self._num_pages = 0  # of KV that are being read

    def run(self) -> None:
        try:
            while not self._is_told_to_stop():
                self._take(self._queue.get())
                self._begin_more()
                while self._loads and self._is_over(self._loads[0]):
                    self._loads.popleft()
        finally:
            for part in [part for load in self._loads for part in load.parts]:
                for job in part.jobs.values():
                    job.wait()

    def _is_told_to_stop(self) -> bool:
        return bool(self._controller.storage_stop_event.is_set())

    def _take(self, item: LoadOperation | _LoadedPart | None) -> None:
        if isinstance(item, _LoadedPart):
            item.num_left -= 1
            if not item.num_left:
                self._num_pages -= item.num_pages
                item.load.is_cut |= item.num_arrived < item.num_pages
                if item.slots is not None and PoolName.KV in item.jobs:
                    self._tiers.note_loaded(item.jobs[PoolName.KV], item.slots)
        elif item is not None:  # None: SGLang wakes the thread
            self._loads.append(item)
            self._to_begin.append(item)

    # ---- What is begun ----

    def _begin_more(self) -> None:
        """Begin to read what comes next."""
        if not self._to_begin:  # the tiers are perhaps not open yet
            return
        try:
            num_pages = self._tiers.part_bytes / self._page_bytes()
        except Exception:
            logger.exception("no load can begin; their requests compute their prompts")
            for load in self._to_begin:
                load.is_cut = True
            self._to_begin.clear()
            return
        part_pages = max(1, int(min(STORAGE_BATCH_SIZE, num_pages)))
        limit = NUM_PARTS * part_pages
        while self._to_begin and self._num_pages < limit and not self._is_told_to_stop():
            if self._to_begin[0].goes_on:
                self._begin_kv(self._to_begin[0], part_pages)
            else:
                self._to_begin.popleft()

    def _begin_kv(self, load: LoadOperation, part_pages: int) -> None:
        start, page_size = load.num_begun, self._controller.page_size
        batch_end = (start // STORAGE_BATCH_SIZE + 1) * STORAGE_BATCH_SIZE
        load.num_begun = end = min(start + part_pages, batch_end, len(load.hash_value))
        hashes = load.hash_value[start:end]
        slots = load.host_indices[start * page_size : end * page_size]
        pools = [each.name for each in load.pool_transfers or () if _is_like_kv(each)]
        part = _LoadedPart(load, end - start, end, slots)
        self._num_pages += part.num_pages
        self._begin(part, [(pool, hashes, slots) for pool in (PoolName.KV, *pools)])

    def _begin_states(self, load: LoadOperation) -> None:
        """Begin to read the other pools, whose pages are of use behind whole KV only."""
        if load.has_failed or load.num_arrived < len(load.hash_value) or load.is_terminated():
            return
        controller, num_pages = self._controller, load.num_arrived
        hashes = load.sidecar_hash_values or load.hash_value
        if load.sidecar_hash_values is not None:
            num_pages = load.sidecar_hit_pages
        states = [each for each in load.pool_transfers or () if not _is_like_kv(each)]
        try:
            controller._sync_trailing_keys(states, hashes, num_pages)  # noqa: SLF001
            controller._resolve_sidecar_nonkv_derived_pool_transfers(load)  # noqa: SLF001
        except Exception:
            logger.exception("the other pools of a load cannot be read; its request computes it")
            return
        wanted = [(each.name, each.keys, each.host_indices) for each in states if each.keys]
        self._begin(_LoadedPart(load, 0, 0), [each for each in wanted if each[2] is not None])

    def _begin(
        self, part: _LoadedPart, wanted: Sequence[tuple[PoolName, Sequence[str], torch.Tensor]]
    ) -> None:
        load = part.load
        load.parts.append(part)
        try:
            for pool, hashes, slots in wanted:
                part.jobs[pool] = self._tiers.begin_load(
                    pool,
                    hashes,
                    slots,
                    tenant=load.tenant,
                    meter=self._tiers.meter_of(load.handle),
                )
        except Exception:
            logger.exception("the rest of a load cannot be read; its request computes it")
            load.is_cut, part.is_whole = True, False
        part.num_left = len(part.jobs)
        if not part.num_left:
            self._num_pages -= part.num_pages
        for job in part.jobs.values():
            job.call_at_end(partial(self._note_end, part))

    def _note_end(self, part: _LoadedPart, _: Job) -> None:
        self._queue.put(part)

    # ---- What SGLang is told ----

    def _is_over(self, load: LoadOperation) -> bool:
        """Tell of what has ended of the load whose turn it is. Returns whether that was all."""
        while True:
            while load.parts and not load.parts[0].num_left:
                part = load.parts.popleft()
                if part.end:
                    self._tell_part(load, part)
                else:
                    self._tell(load, pool_hits=part.hits)
            if load.parts or load.goes_on:
                return False
            if load.has_states:
                break
            while load.num_batches * STORAGE_BATCH_SIZE < len(load.hash_value):
                self._tell_batch(load)  # as many as other ranks, whose reads may not have failed
            load.has_states = True
            if load.pool_transfers is not None:
                self._begin_states(load)
                if not load.parts:
                    self._tell(load, pool_hits={})
        self._tell(load, completed_req=True)
        return True

    def _tell_part(self, load: LoadOperation, part: _LoadedPart) -> None:
        if not load.has_failed and not load.is_terminated():
            load.num_arrived += part.num_arrived
            load.has_failed = part.num_arrived < part.num_pages
        if part.end % STORAGE_BATCH_SIZE == 0 or part.end == len(load.hash_value):
            self._tell_batch(load)
        elif self._is_alone and not load.pool_transfers and load.num_arrived == part.end:
            self._tell_progress(load)

    def _tell_batch(self, load: LoadOperation) -> None:
        load.num_batches += 1
        self._tell_progress(load)

    def _tell_progress(self, load: LoadOperation) -> None:
        self._tell(load, completed_tokens=load.num_arrived * self._controller.page_size)

    def _tell(self, load: LoadOperation, **of_load: Any) -> None:
        self._acks.put(PrefetchAck(rid=load.request_id, operation=load, **of_load))


def _is_like_kv(transfer: Any) -> bool:
    """Whether a pool shares the indices of KV, and is read with it."""
    return bool(transfer.indices_from_pool == PoolName.KV)
