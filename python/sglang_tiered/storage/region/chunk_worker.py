"""What the chunk writers do: hash placed extents and put them on the device, several at once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_tiered.storage.region.jobs import Batch
from sglang_tiered.storage.region.writer import cut_chunks, hash_batch, write_fully

if TYPE_CHECKING:
    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.jobs import Chunk
    from sglang_tiered.storage.region.state import StoreState

__all__ = ["ChunkWorker"]

logger = logging.getLogger(__name__)


class ChunkWorker:
    """Every chunk-writer thread runs ``run`` of the same worker."""

    def __init__(self, state: StoreState, health: HealthMonitor, device: Device) -> None:
        self._state = state
        self._health = health
        self._device = device

    def run(self) -> None:
        """Until the writer thread has nothing under way any more."""
        while (task := self._take()) is not None:
            if isinstance(task, Batch):
                self._hash(task)
            else:
                self._write(task)
            del task  # its pages are the caller's memory

    def _take(self) -> Batch | Chunk | None:
        """The device comes first: what it waits for is written before more is hashed."""
        state = self._state
        with state.lock:
            while True:
                if state.may_write_chunk():
                    state.num_chunks_writing += 1
                    return state.chunks.popleft()
                if state.batches:
                    return state.batches.popleft()
                if state.written_all:
                    return None
                state.chunk_ready.wait()

    def _hash(self, batch: Batch) -> None:
        state, write = self._state, batch.write
        error = None
        try:
            hash_batch(batch)
        except Exception as fault:
            error = _internal(fault)
        with state.lock:
            write.error = write.error or error
            write.num_left -= 1
            if write.num_left:
                return
            if write.error is not None:
                state.finish_write(write, None)
                return
        try:
            write.chunks = cut_chunks(write)
        except Exception as fault:
            with state.lock:
                state.finish_write(write, _internal(fault))
            return
        with state.lock:
            state.queue_write(write)

    def _write(self, chunk: Chunk) -> None:
        state, write = self._state, chunk.write
        written, error = 0, None
        try:
            with self._health.watch():
                fd = write.region.fd
                written = write_fully(self._device, fd, chunk.segments, chunk.offset)
        except OSError as failure:
            error = failure
        except Exception as fault:
            error = _internal(fault)
        with state.lock:
            state.num_chunks_writing -= 1
            state.bytes_written += written
            write.error = write.error or error
            write.num_left -= 1
            if write.num_left == 0:
                state.finish_write(write, None)
            if state.chunks:
                state.chunk_ready.notify()


def _internal(fault: Exception) -> OSError:
    logger.exception("storing failed by our own fault")
    return OSError(f"internal error: {fault}")
