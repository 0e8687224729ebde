"""``BackupWorker``: several stores under way on SGLang's backup thread, which waits for none."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import StorageOperation

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
"""Full parts under way: one that is waited for, and one that keeps the disk busy meanwhile. More
would be admitted before the disk takes it, by what is known too early."""

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
