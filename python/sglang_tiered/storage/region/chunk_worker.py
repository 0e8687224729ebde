"""What the chunk writers do: put placed extents on the device, several writes at once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_tiered.storage.region.writer import write_fully

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
        state = self._state
        while True:
            with state.lock:
                while not state.may_write_chunk():
                    if state.written_all:
                        return
                    state.chunk_ready.wait()
                chunk = state.chunks.popleft()
                state.num_chunks_writing += 1
            written, error = self._write(chunk)
            with state.lock:
                state.num_chunks_writing -= 1
                state.bytes_written += written
                write = chunk.write
                write.error = write.error or error
                write.num_chunks_left -= 1
                if write.num_chunks_left == 0:
                    state.store_ready.notify()
                if state.chunks:
                    state.chunk_ready.notify()
            del chunk, write  # the segments are the caller's memory

    def _write(self, chunk: Chunk) -> tuple[int, OSError | None]:
        try:
            with self._health.watch():
                fd = chunk.write.region.fd
                return write_fully(self._device, fd, chunk.segments, chunk.offset), None
        except OSError as error:
            return 0, error
        except Exception as error:
            logger.exception("writing failed by our own fault")
            return 0, OSError(f"internal error: {error}")
