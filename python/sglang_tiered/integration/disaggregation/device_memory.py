"""KV pools in device memory, for ``transfer``: gathered there, staged through pinned host memory.

Plain torch operations on a stream of its own, one buffer at a time, and each waited for: right
before fast. Written without a CUDA device at hand; the tests run it on CPU tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from sglang_tiered.transfer.memory import Buffer, Bytes, Pages, TokenSlice

__all__ = ["DeviceMemory"]


class _Pointer:
    """Device memory by address, in the form torch takes without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class DeviceMemory:
    """``PagedMemory`` over buffers of one device; ``cpu`` for tests. The caller keeps the pool."""

    is_host = False

    def __init__(self, buffers: Sequence[Buffer], device: str) -> None:
        self.buffers = tuple(buffers)
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self._stream: Any = (
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            if self._is_cuda
            else None
        )
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._views = [self._view(buffer) for buffer in self.buffers]

    def gather(self, buffer: int, pages: Pages, part: TokenSlice | None, out: Bytes) -> None:
        """Pages that SGLang has computed: it sends them only then."""
        with self._on_stream():
            rows = self._rows(buffer, part)[self._index(pages)].reshape(-1)
            staged = self._staged(out.nbytes)
            staged.copy_(rows, non_blocking=True)
            self.flush()
        out[:] = staged.numpy()

    def scatter(self, buffer: int, pages: Pages, part: TokenSlice | None, data: Bytes) -> None:
        """Waits until the bytes are there, so that ``data`` may be used again."""
        with self._on_stream():
            staged = self._staged(data.nbytes)
            staged.numpy()[:] = data
            rows = self._rows(buffer, part)
            values = staged.to(self._device, non_blocking=True)
            rows[self._index(pages)] = values.reshape(len(pages), *rows.shape[1:])
            self.flush()

    def flush(self) -> None:
        """Returns when all of it may be read, on any stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _view(self, buffer: Buffer) -> torch.Tensor:
        num_rows = buffer.num_bytes // buffer.page_bytes
        size = num_rows * buffer.page_bytes
        if self._is_cuda:
            flat = torch.as_tensor(_Pointer(buffer.address, size), device=self._device)
        else:
            memory: Any = (ctypes.c_ubyte * size).from_address(buffer.address)
            flat = torch.frombuffer(memory, dtype=torch.uint8)
        return flat.reshape(num_rows, buffer.page_bytes)

    def _rows(self, buffer: int, part: TokenSlice | None) -> torch.Tensor:
        view = self._views[buffer]
        if part is None:
            return view
        return view.reshape(len(view), -1, part.token_bytes)[:, :, part.low : part.high]

    def _index(self, pages: Pages) -> torch.Tensor:
        return torch.from_numpy(pages).to(self._device, torch.int64)

    def _staged(self, num_bytes: int) -> torch.Tensor:
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        return self._staging[:num_bytes]
