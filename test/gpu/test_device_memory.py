"""Pages out of a CUDA pool and into one, against the same pages in host memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_tiered.integration.disaggregation.device_memory import DeviceMemory
from sglang_tiered.transfer.memory import Buffer, HostMemory, SlabPiece, TokenSlice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BUFFERS, PAGES, TOKENS, TOKEN_BYTES = 4, 64, 16, 512
PAGE_BYTES = TOKENS * TOKEN_BYTES


@pytest.mark.parametrize("part", [None, TokenSlice(TOKEN_BYTES, 128, 384)], ids=["whole", "heads"])
def test_device_pool_equals_host_memory(part: TokenSlice | None) -> None:
    source = np.random.default_rng(1)
    array = source.integers(0, 256, (BUFFERS, PAGES, PAGE_BYTES), dtype=np.uint8)
    pool = torch.from_numpy(array).to("cuda")
    host = HostMemory([Buffer(one.ctypes.data, one.nbytes, PAGE_BYTES) for one in array])
    device = DeviceMemory(
        [Buffer(one.data_ptr(), one.nbytes, PAGE_BYTES) for one in pool], "cuda:0"
    )
    device.enter_thread()
    size = PAGE_BYTES if part is None else TOKENS * part.num_bytes
    pieces = [SlabPiece(index, size, part) for index in range(BUFFERS)]
    pages = source.permutation(PAGES)[:23].astype(np.int32)
    placed, begun = device.place(pages), []
    for start in range(0, 20, 4):  # more slabs at once than have memory on the device
        out = device.new_buffer(BUFFERS * 4 * size)
        begun.append((start, out, device.begin_gather(pieces, placed[start : start + 4], out)))
    for start, out, wait in begun:
        wait()
        expected = np.empty_like(out)
        host.begin_gather(pieces, pages[start : start + 4], expected)()
        assert np.array_equal(out, expected)
    data = source.integers(0, 256, BUFFERS * len(pages) * size, dtype=np.uint8)
    host.scatter_slab(pieces, pages, data)
    device.scatter_slab(pieces, pages, data)
    assert np.array_equal(pool.cpu().numpy(), array)
