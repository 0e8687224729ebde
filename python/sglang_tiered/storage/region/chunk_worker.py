"""What hashers and chunk writers do: hash placed extents, and put them on the device.

Apart, so that the device always has as many writes as there are chunk writers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_tiered.storage.region.writer import cut_chunks, hash_batch, write_fully

if TYPE_CHECKING:
    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.jobs import Batch, Chunk
    from sglang_tiered.storage.region.state import StoreState

__all__ = ["ChunkWorker", "HashWorker"]

logger = logging.getLogger(__name__)


class HashWorker:
    """Every hasher thread runs ``run`` of the same worker."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def run(self) -> None:
        """Until the writer thread has nothing under way any more."""
        state = self._state
        while True:
            with state.lock:
                while not state.batches:
                    if state.written_all:
                        return
                    state.batch_ready.wait()
                batch = state.batches.popleft()
            self._hash(batch)
            del batch  # its pages are the caller's memory

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
            state.queue_hashed()


class ChunkWorker:
    """Every chunk-writer thread runs ``run`` of the same worker."""

    def __init__(self, state: StoreState, health: HealthMonitor, device: Device) -> None:
        self._state = state
        self._health = health
        self._device = device

    def run(self) -> None:
        """Until the writer thread has nothing under way any more."""
        state = self._state
        while True:
            with state.lock:
                while not state.may_write_chunk():
                    if state.written_all:
                        return
                    state.chunk_ready.wait()
                chunk = state.chunks.popleft()
                state.num_chunks_writing += 1
            self._write(chunk)
            del chunk  # its segments are the caller's memory

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
