"""``StoreAhead``: keeps several stores under way for SGLang's backup thread."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, PoolName

from sglang_tiered.storage.base import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from queue import Queue

    import torch

    from sglang_tiered.policy.admission import Outcome
    from sglang_tiered.storage.base import Job

__all__ = ["BegunStore", "StoreAhead"]

logger = logging.getLogger(__name__)

PART_S = 0.02
MIN_PART_BYTES = 8 << 20
"""An extent of the engine, which writes several at once: less would leave a fast disk idle."""

MAX_PART_BYTES = 64 << 20
NUM_PARTS = 2
"""Full parts under way: one that is waited for, and one that keeps the disk busy meanwhile."""

MAX_STORES_AHEAD = 64
"""Queued operations that are looked at for something to store."""

MEASURED_S = 1.0
"""Writing whose speed counts in full; what was before it counts half, and so on."""


@dataclass(eq=False)
class BegunStore:
    """Pages that were handed to the tier, or were not admitted. Of the backup thread."""

    job: Job | None  # of the admitted pages; None: there are none
    host_indices: torch.Tensor  # [pages * page_size] int64
    num_pages: int
    num_admitted: int
    why: Outcome | None  # not all were admitted
    counts: bool  # the page accounting hears of the end


class _Piece(NamedTuple):
    """Pages of one pool that are stored at once."""

    pool: PoolName
    hashes: Sequence[str]
    host_indices: torch.Tensor


class _Part:
    """A piece under way. ``ended_at`` is set before its job is done."""

    def __init__(self, begun: BegunStore, begun_at: float, clock: Callable[[], float]) -> None:
        self.begun = begun
        self.begun_at = self.ended_at = begun_at
        self.num_bytes = 0
        if begun.job is not None:
            self.num_bytes = begun.job.run.num_bytes
            begun.job.call_at_end(lambda job: setattr(self, "ended_at", clock()))

    def cancel(self) -> None:
        if self.begun.job is not None:
            self.begun.job.cancel()

    def wait(self) -> None:
        if self.begun.job is not None:
            self.begun.job.wait()


class _WriteSpeed:
    """Bytes written per second of the time in which a store was under way."""

    def __init__(self) -> None:
        self._num_bytes = self._busy_s = 0.0
        self._last_end = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Return the measured speed; 0 before the first store."""
        return self._num_bytes / self._busy_s if self._busy_s else 0.0

    def note(self, part: _Part) -> None:
        """Note a part that ended. In the order of the begins, in which the engine writes."""
        job = part.begun.job
        busy_s = part.ended_at - max(part.begun_at, self._last_end)
        self._last_end = max(part.ended_at, self._last_end)
        if job is None or any(reason is not Reason.OK for reason in job.reasons):
            return
        self._num_bytes += part.num_bytes
        self._busy_s += max(0.0, busy_s)
        if self._busy_s > MEASURED_S:
            self._num_bytes, self._busy_s = self._num_bytes / 2, self._busy_s / 2


class StoreAhead:
    """Several stores under way for SGLang's backup thread, which does one at a time.

    The thread stores the other pools of a node, then up to 128 of its KV pages a call, and waits
    each time; between two calls the disk is idle, and the engine has nothing that it could write as
    one extent. Here pieces are begun in the order in which the thread will ask for them, of this
    operation and of those that SGLang has queued behind it, as far as ``NUM_PARTS`` parts reach.
    Pages are cut into parts of ``PART_S`` as the writing was measured. What SGLang queues while the
    thread waits is looked at when that part has ended. Results go to SGLang in its own order: acks
    are as many, and come one after the other, as without it.

    SGLang keeps the host pages of an operation until its ack was taken, or until its threads have
    ended. So ``carry_out`` waits for what was begun of an operation, and ``finish`` at the end of
    the thread for what was begun of those that the thread will not come to. Where SGLang moves
    pages in host memory, it does so between two operations (``layout_lease``).

    ``begin`` admits pages of an operation, by its number, and hands them to the tier, ``end`` waits
    for that and returns which are stored; admission takes an operation as a whole, so none is begun
    before all of the one before. ``stores_queued`` is false where pages move. On
    the backup thread only.
    """

    def __init__(
        self,
        begin: Callable[[PoolName, Sequence[str], torch.Tensor, int | None], BegunStore],
        end: Callable[[BegunStore], list[bool]],
        *,
        page_bytes: Callable[[PoolName], int],
        page_size: int,
        stores_queued: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._begin_store, self._end_store = begin, end
        self._page_bytes, self._page_size = cache(page_bytes), page_size
        self._stores_queued = stores_queued
        self._clock = clock
        self._speed = _WriteSpeed()
        # By operation, pool and first page.
        self._under_way: dict[tuple[Any, PoolName, str], _Part] = {}
        self._num_bytes = 0  # of these
        # What is left to begin of each operation that was looked at, or why that failed.
        self._left: dict[Any, Iterator[_Piece] | Exception] = {}
        self._controller: Any = None
        self._operation: Any = None  # that SGLang's thread is at

    @property
    def part_bytes(self) -> float:
        """Return how much is stored at once."""
        return min(MAX_PART_BYTES, max(MIN_PART_BYTES, PART_S * self._speed.bytes_per_s))

    def carry_out(
        self, original: Callable[[Any, Any], Any], controller: Any, operation: Any
    ) -> Any:
        """Wrap ``HybridCacheController._page_backup``, which stores one node."""
        if controller.backup_skip:  # KV is another rank's to store
            return original(controller, operation)
        with controller.mem_pool_host.layout_lease():
            self._controller, self._operation = controller, operation
            try:
                return original(controller, operation)
            finally:
                self._controller = self._operation = None
                self._left.pop(operation, None)
                self._end_all([key for key in self._under_way if key[0] is operation])

    def finish(self) -> None:
        """End all that is under way: the thread ends, and memory may be emptied."""
        self._left.clear()
        for part in self._under_way.values():
            part.cancel()
        self._end_all(list(self._under_way))

    def store(
        self, pool: PoolName, hashes: Sequence[str], host_indices: torch.Tensor
    ) -> list[bool]:
        """Store the next pages of the operation; return which are stored. Stops behind the first
        part of KV that is not, and when SGLang has told its thread to stop."""
        operation = self._operation
        if operation is None:  # not SGLang's own thread
            return self._end_store(self._begin_store(pool, hashes, host_indices, None))
        stored: list[bool] = []
        refused: BegunStore | None = None
        is_told_to_stop = self._controller.storage_stop_event.is_set
        while len(stored) < len(hashes) and not is_told_to_stop():
            if pool == PoolName.KV and not all(stored):
                break
            at = len(stored)
            key = operation, pool, hashes[at]
            while key not in self._under_way and self._begin_next(operation):
                pass
            if key not in self._under_way:
                if isinstance(failed := self._left.get(operation), Exception):
                    raise failed
                slots = host_indices[at * len(host_indices) // len(hashes) :]
                self._begin(operation, _Piece(pool, hashes[at:], slots))
            self._begin_more()
            begun = self._under_way[key].begun
            stored += self._end(key)
            if begun.num_admitted < begun.num_pages:
                refused = begun
        num_left = len(hashes) - len(stored)
        if pool == PoolName.KV and refused is not None and num_left:
            # Admission refused these too, and says of what is never begun no more.
            slots = host_indices[len(stored) * len(host_indices) // len(hashes) :]
            rest = replace(
                refused, job=None, host_indices=slots, num_pages=num_left, num_admitted=0
            )
            stored += self._end_store(rest)
        else:
            stored += [False] * num_left
        if pool == PoolName.KV and not all(stored):  # SGLang leaves out the rest
            self._left[operation] = iter(())
            for (of, *_), part in self._under_way.items():
                if of is operation:
                    part.cancel()
        return stored

    # ---- What is begun next ----

    def _begin_more(self) -> None:
        """Begin what SGLang's thread will ask for next."""
        limit = NUM_PARTS * max(self.part_bytes, self._page_bytes(PoolName.KV))
        for operation in self._operations():
            while self._num_bytes < limit and self._begin_next(operation):
                pass
            if self._num_bytes >= limit or isinstance(self._left.get(operation), Exception):
                return

    def _operations(self) -> Iterator[Any]:
        yield self._operation
        if not self._stores_queued:
            return
        queue: Queue[Any] = self._controller.backup_queue
        with queue.mutex:
            queued = list(islice(queue.queue, MAX_STORES_AHEAD))
        yield from (operation for operation in queued if operation is not None)  # None: wake up

    def _begin_next(self, operation: Any) -> bool:
        """Begin the next piece of an operation; return whether there was one. One that fails is not
        tried again: the gate does not know any more whose pages these are."""
        left = self._left.setdefault(operation, self._pieces(operation))
        if isinstance(left, Exception):
            return False
        try:
            piece = next(left, None)
            if piece is None:
                return False
            begun = self._begin(operation, piece)
        except Exception as error:  # raised in its turn, where SGLang expects that
            self._left[operation] = error
            return False
        if piece.pool == PoolName.KV and begun.num_admitted < begun.num_pages:
            self._left[operation] = iter(())  # SGLang leaves out the rest
        return True

    def _pieces(self, operation: Any) -> Iterator[_Piece]:
        """Yield what SGLang's thread will ask for, in its order."""
        controller = self._controller
        if operation.pool_transfers:
            controller._resolve_sidecar_kv_derived_pool_transfers(operation)  # noqa: SLF001
            controller._resolve_sidecar_nonkv_derived_pool_transfers(operation)  # noqa: SLF001
        for transfer in operation.pool_transfers or ():
            if not transfer.keys or transfer.host_indices is None:
                continue
            whole = _Piece(transfer.name, transfer.keys, transfer.host_indices)
            if transfer.keys[:1] == operation.hash_value[:1]:
                yield from self._cut(whole, len(transfer.host_indices) // len(transfer.keys))
            else:  # of the last pages: admission knows them by the end of the node
                yield whole
        kv = _Piece(PoolName.KV, operation.hash_value, operation.host_indices)
        yield from self._cut(kv, self._page_size)

    def _cut(self, whole: _Piece, page_slots: int) -> Iterator[_Piece]:
        pool, hashes, slots = whole
        start = 0
        while start < len(hashes):
            # No part of KV goes beyond a call, which takes whole parts.
            call_end = (start // STORAGE_BATCH_SIZE + 1) * STORAGE_BATCH_SIZE
            num_pages = max(1, int(self.part_bytes // self._page_bytes(pool)))
            end = min(start + num_pages, call_end, len(hashes))
            yield _Piece(pool, hashes[start:end], slots[start * page_slots : end * page_slots])
            start = end

    # ---- What is under way ----

    def _begin(self, operation: Any, piece: _Piece) -> BegunStore:
        begun_at = self._clock()
        begun = self._begin_store(*piece, operation.id)
        part = _Part(begun, begun_at, self._clock)
        self._under_way[operation, piece.pool, piece.hashes[0]] = part
        self._num_bytes += part.num_bytes
        return begun

    def _end(self, key: tuple[Any, PoolName, str]) -> list[bool]:
        part = self._under_way[key]
        part.wait()
        del self._under_way[key]
        self._num_bytes -= part.num_bytes
        self._speed.note(part)
        return self._end_store(part.begun)

    def _end_all(self, keys: list[tuple[Any, PoolName, str]]) -> None:
        for key in keys:
            self._under_way[key].wait()  # whatever happens at an end
        for key in keys:
            try:
                self._end(key)
            except Exception:
                logger.exception("a store has ended, and its pages may be counted as dirty")
