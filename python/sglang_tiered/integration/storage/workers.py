"""``BackupWorker`` and ``LoadWorker``: several stores and several loads under way on SGLang's two
threads for them, which wait for none."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.cache_controller import PrefetchAck
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, PoolName, count_pool_hits
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    PrefetchOperation,
    StorageOperation,
)

from sglang_tiered.storage.base import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from sglang_tiered.integration.storage.admission_gate import QueuedStore
    from sglang_tiered.integration.storage.backend import BegunStore, TieredStorage
    from sglang_tiered.storage.base import Job


_Piece = tuple["PoolName", "Sequence[str]", "torch.Tensor", int]
"""A pool, hashes and slots of pages that are stored at once, and the number of the page behind."""

logger = logging.getLogger(__name__)

PART_S = 0.02
MIN_PART_BYTES = 8 << 20
"""Some writes of the engine, which makes several at once: less would leave a fast disk idle."""

MAX_PART_BYTES = 64 << 20
NUM_PARTS = 2
"""Full parts under way, of stores and of loads: one that is waited for, and one that keeps the disk
busy meanwhile. More stores would be admitted before the disk takes them, by what is known too
early."""

MEASURED_S = 1.0
"""Writing whose speed counts in full; what was before it counts half, and so on."""


class StoreOperation(StorageOperation):  # type: ignore[misc]
    """SGLang's record of a node that is stored, and how far its store has come."""

    id: int

    def __init__(
        self,
        queued: QueuedStore,
        host_indices: torch.Tensor,
        token_ids: list[int],
        hash_value: list[str] | None,
        pool_transfers: list[Any] | None = None,
    ) -> None:
        super().__init__(
            host_indices, token_ids, hash_value=hash_value, pool_transfers=pool_transfers
        )
        self.queued = queued
        self.left: Iterator[_Piece] | None = None  # to begin; None until the worker looks at it
        self.num_under_way = 0  # parts of it
        self.is_begun = False  # all that is to begin
        self.stored = [False] * len(self.hash_value)  # of KV

    @property
    def num_stored(self) -> int:
        """Count the leading pages of whole calls that are stored, as SGLang does."""
        num_leading = [*self.stored, False].index(False)
        is_whole = num_leading == len(self.stored)
        return num_leading if is_whole else num_leading // STORAGE_BATCH_SIZE * STORAGE_BATCH_SIZE


@dataclass(eq=False, slots=True)
class _StoredPart:
    """Pages of a node that are being stored, up to page ``end`` of their pool."""

    node: StoreOperation
    pool: PoolName
    end: int
    begun: BegunStore
    begun_at: float
    ended_at: float  # set before its job is done

    @property
    def job(self) -> Job | None:
        return self.begun.job

    @property
    def num_bytes(self) -> int:
        return 0 if self.job is None else self.job.run.num_bytes


class BackupWorker:
    """Carries out the stores of one controller on its backup thread, until that is told to stop.

    All that happens comes through the controller's queue: nodes to store, and parts that have
    ended. Pages are cut into parts of ``PART_S`` as the writing was measured; the next one begins
    when one ends, as far as ``NUM_PARTS`` reach. A node's other pools go before its KV. It is
    acked when all that was begun of it has ended, in SGLang's order.

    SGLang keeps the host pages of a node until its ack was taken, or until the thread has ended:
    ``run`` returns only then."""

    def __init__(
        self,
        controller: Any,
        tiers: TieredStorage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller, self._tiers, self._clock = controller, tiers, clock
        self._queue = controller.backup_queue
        self._page_bytes = cache(tiers.page_bytes)
        # Bytes written in so many seconds with a store under way, and when the last one ended.
        self._num_written = self._busy_s = self._last_end = 0.0
        self._nodes: deque[StoreOperation] = deque()  # not acked
        self._to_begin: deque[StoreOperation] = deque()  # of these
        self._parts: set[_StoredPart] = set()  # under way
        self._num_bytes = 0  # of these

    @property
    def part_bytes(self) -> float:
        """Return how much is stored at once."""
        bytes_per_s = self._num_written / self._busy_s if self._busy_s else 0.0
        return min(MAX_PART_BYTES, max(MIN_PART_BYTES, PART_S * bytes_per_s))

    def run(self) -> None:
        try:
            while not self._is_told_to_stop():
                self._take(self._queue.get())
                self._begin_more()
                self._ack()
        finally:
            self._finish()

    def _is_told_to_stop(self) -> bool:
        return bool(self._controller.storage_stop_event.is_set())

    def _take(self, item: StoreOperation | _StoredPart | None) -> None:
        if isinstance(item, _StoredPart):
            self._end(item)
        elif item is not None:  # None: SGLang wakes the thread
            self._nodes.append(item)
            self._to_begin.append(item)

    def _finish(self) -> None:
        """End all that is under way: the thread ends, and memory may be emptied."""
        for part in self._parts:
            self._cancel(part)
        for part in list(self._parts):
            assert part.job is not None
            part.job.wait()
            self._end(part)

    # ---- What is begun next ----

    def _begin_more(self) -> None:
        limit = NUM_PARTS * max(self.part_bytes, self._page_bytes(PoolName.KV))
        while self._to_begin and self._num_bytes < limit and not self._is_told_to_stop():
            node = self._to_begin[0]
            if node.left is None:
                node.left = self._pieces(node)
            try:
                piece = next(node.left, None)
                if piece is not None:
                    self._begin(node, piece)
            except Exception:
                logger.exception("a store cannot begin; its pages may be counted as dirty")
                piece = None
            if piece is None:
                node.is_begun = True
                self._to_begin.popleft()

    def _pieces(self, node: StoreOperation) -> Iterator[_Piece]:
        if node.pool_transfers:
            self._controller._resolve_sidecar_kv_derived_pool_transfers(node)  # noqa: SLF001
            self._controller._resolve_sidecar_nonkv_derived_pool_transfers(node)  # noqa: SLF001
        for transfer in node.pool_transfers or ():
            if transfer.keys and transfer.host_indices is not None:
                yield from self._cut(transfer.name, transfer.keys, transfer.host_indices)
        if node.hash_value:
            yield from self._cut(PoolName.KV, node.hash_value, node.host_indices)

    def _cut(
        self, pool: PoolName, hashes: Sequence[str], host_indices: torch.Tensor
    ) -> Iterator[_Piece]:
        page_slots = len(host_indices) // len(hashes)
        start = 0
        while start < len(hashes):
            num_pages = max(1, int(self.part_bytes // self._page_bytes(pool)))
            end = min(start + num_pages, len(hashes))
            slots = host_indices[start * page_slots : end * page_slots]
            yield pool, hashes[start:end], slots, end
            start = end

    def _begin(self, node: StoreOperation, piece: _Piece) -> None:
        (pool, hashes, slots, end), now = piece, self._clock()
        begun = self._tiers.begin_store(pool, hashes, slots, node.queued)
        part = _StoredPart(node, pool, end, begun, now, now)
        node.num_under_way += 1
        self._num_bytes += part.num_bytes
        self._parts.add(part)
        if part.job is None:
            self._end(part)
        else:
            part.job.call_at_end(lambda _: self._note_end(part))
        if pool == PoolName.KV and begun.num_admitted < begun.num_pages:
            self._refuse_rest(node, end, begun)

    def _note_end(self, part: _StoredPart) -> None:
        part.ended_at = self._clock()
        self._queue.put(part)

    def _refuse_rest(self, node: StoreOperation, end: int, begun: BegunStore) -> None:
        """Count what admission refused beyond a part: it is never begun."""
        node.left = iter(())
        if num_left := len(node.hash_value) - end:
            slots = node.host_indices[-num_left * (len(begun.host_indices) // begun.num_pages) :]
            rest = replace(begun, job=None, host_indices=slots, num_pages=num_left, num_admitted=0)
            self._end_store(rest)

    # ---- What has ended ----

    def _end(self, part: _StoredPart) -> None:
        node = part.node
        self._parts.remove(part)
        self._num_bytes -= part.num_bytes
        node.num_under_way -= 1
        self._note_speed(part)
        stored = self._end_store(part.begun)
        if part.pool != PoolName.KV:
            return
        node.stored[part.end - len(stored) : part.end] = stored
        if not all(stored):  # the rest is of no use
            node.left = iter(())
            for other in self._parts:
                if other.node is node:
                    self._cancel(other)

    def _note_speed(self, part: _StoredPart) -> None:
        """Note a part that ended. What was held, refused or failed says nothing of the disk."""
        busy_s = part.ended_at - max(part.begun_at, self._last_end)
        self._last_end = max(part.ended_at, self._last_end)
        if part.job is None or any(reason is not Reason.OK for reason in part.job.reasons):
            return
        self._num_written += part.num_bytes
        self._busy_s += max(0.0, busy_s)
        if self._busy_s > MEASURED_S:
            self._num_written, self._busy_s = self._num_written / 2, self._busy_s / 2

    def _end_store(self, begun: BegunStore) -> list[bool]:
        try:
            return self._tiers.end_store(begun)
        except Exception:
            logger.exception("a store has ended, and its pages may be counted as dirty")
            return [False] * begun.num_pages

    def _cancel(self, part: _StoredPart) -> None:
        if part.job is not None:
            part.job.cancel()

    def _ack(self) -> None:
        while self._nodes and self._nodes[0].is_begun and not self._nodes[0].num_under_way:
            node = self._nodes.popleft()
            node.completed_tokens = node.num_stored * self._controller.page_size
            self._tiers.gate.store_ended(node.queued)
            self._controller.ack_backup_queue.put(node)


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
