"""(c) Pages out of a device's pool and back, by ``page_copy`` and by what it takes the place of."""

from __future__ import annotations

import mmap
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gpu_report.figures import Part, run_part
from sglang_tiered_kernels.page_copy import PagedPool, gather, scatter

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, TOKEN_BYTES = 32, 8 * 128 * 2  # Llama-3-8B: 64 KiB of KV per token and K or V
WRITE_BYTES = 16 << 20


class Copies:
    """A pool of random bytes on the device, some of its pages in no order, and a slab for them."""

    def __init__(self, part: Part, page_size: int) -> None:
        self.part, self.device = part, torch.device(part.device)
        self.page_size = page_size
        num_buffers = part.size(2 * LAYERS, 2 * LAYERS, 4)
        token_bytes = TOKEN_BYTES if not part.rehearse else 32
        size = part.size(8192, 8192, 256) * 2 // page_size, page_size * token_bytes
        self.pool_buffers = [
            torch.randint(0, 256, size, dtype=torch.uint8, device=self.device)
            for _ in range(num_buffers)
        ]
        self.pool = PagedPool(self.pool_buffers)
        order = torch.randperm(self.pool.num_pages, generator=torch.Generator().manual_seed(1))
        self.pages = order[: self.pool.num_pages // 2].to(self.device)
        self.count = len(self.pages)
        self.num_bytes = self.count * len(self.pool_buffers) * self.pool.page_bytes
        self.on_host = self.pages.tolist()
        is_cuda = self.device.type == "cuda"
        self.slab = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        self.pinned = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=is_cuda)

    def seconds(self, run: Callable[[], Any], rounds: int) -> list[float]:
        """Each round waited for; the first, which compiles and warms, is not counted."""
        found = []
        for _ in range(rounds + 1):
            self.wait()
            begin = time.perf_counter()
            run()
            self.wait()
            found.append(time.perf_counter() - begin)
        return found[1:]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def view(self) -> torch.Tensor:
        return self.slab.view(self.pool.slab_shape(self.count))

    def by_page(self) -> None:
        """One copy a page and buffer, as without a kernel."""
        offset, size = 0, self.pool.page_bytes
        for buffer in self.pool.buffers:
            for page in self.on_host:
                self.pinned[offset : offset + size].copy_(buffer[page].flatten(), non_blocking=True)
                offset += size

    def by_index(self) -> None:
        """PyTorch's index operation for each buffer, then one copy."""
        for target, buffer in zip(self.view(), self.pool.buffers, strict=True):
            torch.index_select(buffer.flatten(1), 0, self.pages, out=target)
        self.pinned.copy_(self.slab, non_blocking=True)

    def by_kernel(self) -> None:
        gather(self.pool, self.pages, self.view())
        self.pinned.copy_(self.slab, non_blocking=True)

    def back(self) -> None:
        self.slab.copy_(self.pinned, non_blocking=True)
        scatter(self.view(), self.pages, self.pool)


def run(part: Part) -> None:
    if part.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    for page_size in (64,) if part.rehearse else (16, 64, 128):
        _measure(part, Copies(part, page_size), part.size(9, 5, 2))


def _measure(part: Part, copies: Copies, rounds: int) -> None:
    page_size = copies.page_size
    spent = {"copies": copies.seconds(copies.by_page, 1 if page_size < 64 else 2)}
    expected = copies.pinned.clone()
    spent["index"] = copies.seconds(copies.by_index, rounds)
    spent["kernel"] = copies.seconds(copies.by_kernel, rounds)
    if not torch.equal(copies.pinned, expected):
        raise RuntimeError(f"the kernel with pages of {page_size} copied other bytes")
    spent["back"] = copies.seconds(copies.back, rounds)
    to_host = partial(copies.pinned.copy_, copies.slab, non_blocking=True)
    spent["to_host_alone"] = copies.seconds(to_host, rounds)
    for name, values in spent.items():
        rates = [copies.num_bytes / value / 1e9 for value in values]
        part.save_samples(f"copy_{name}_page{page_size}", rates, "GB/s")
    for name in ("copies", "index"):
        ratio = min(spent[name]) / min(spent["kernel"])
        part.save(f"page_copy_speedup_over_{name}_page{page_size}", ratio, "ratio")
    if page_size == 64:
        _to_nvme(part, copies)


def _to_nvme(part: Part, copies: Copies) -> None:
    """Out of the pool and on to a file with ``O_DIRECT``, from memory that allows it."""
    path = part.folder / "pages"
    step = min(WRITE_BYTES, copies.num_bytes) // 4096 * 4096
    with mmap.mmap(-1, step) as aligned:
        try:
            file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        except OSError as error:
            part.skip("copy_to_nvme", f"{path.parent} has no O_DIRECT ({error})")
            return
        try:
            begin = time.perf_counter()
            copies.by_kernel()
            copies.wait()
            source = memoryview(copies.pinned.numpy())
            for offset in range(0, copies.num_bytes - step + 1, step):
                aligned[:] = source[offset : offset + step]
                os.pwrite(file, aligned, offset)
            os.fsync(file)
            spent = time.perf_counter() - begin
        finally:
            os.close(file)
    part.save("copy_to_nvme", copies.num_bytes / spent / 1e9, "GB/s")


if __name__ == "__main__":
    run_part("copies", run)
