"""Many random batches through the POD kernels and page copies on a CUDA device, seed by seed."""

from __future__ import annotations

import random

import pytest
import torch
from pod_cases import assert_close, make_case, shape_of, sinks_of

from sglang_tiered_kernels.page_copy import PagedPool, gather, scatter
from sglang_tiered_kernels.pod_attention import CONFIGS, Roles, Schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_BATCHES = 6
"""Of each format. Nearly every batch compiles kernels of its own."""

DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp16 on e4m3": (torch.float16, torch.float8_e4m3fn),
    "bf16 on e5m2": (torch.bfloat16, torch.float8_e5m2),
}


def rows_of(source: random.Random) -> tuple[list[int], list[int]]:
    """Chunks on prefixes, prompts, rows without tokens and decodes of very uneven lengths."""
    extend, prefix = [], []
    for _ in range(source.randint(0, 4)):
        extend.append(source.choice([0, 1, 17, 64, source.randint(1, 700)]))
        prefix.append(source.choice([0, 64, source.randint(0, 1500)]))
    for _ in range(source.randint(0 if any(extend) else 1, 12)):
        extend.append(1)
        prefix.append(source.choice([1, 63, source.randint(1, 300), source.randint(1, 6000)]))
    return extend, prefix


@pytest.mark.parametrize("number", range(NUM_BATCHES))
@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_random_batch_matches_under_every_schedule(dtypes: str, number: int) -> None:
    source = random.Random(f"{dtypes} {number}")
    q_dtype, kv_dtype = DTYPES[dtypes]
    shape = shape_of(
        heads=source.choice([(4, 4), (8, 2), (32, 8), (20, 1)]),
        head_dim=source.choice([64, 128]),
        page_size=source.choice([1, 16, 64]),
        dtype=q_dtype,
        kv_dtype=kv_dtype,
    )
    window = source.choice([-1, -1, 0, 63, 300])
    case = make_case(*rows_of(source), shape, window=window, seed=number).to(DEVICE)
    plan = case.plan(CONFIGS[source.choice(list(CONFIGS))], num_sms=source.choice([1, 20, 132]))
    options = {"sinks": sinks_of(shape).to(DEVICE)} if source.random() < 0.3 else {}
    if source.random() < 0.3:
        options["logit_cap"] = 20.0
    expected = case.expected(**options)
    assert_close(case.run(plan, roles=Roles.SERIAL, **options), expected)
    for schedule in Schedule:
        fused = case.run(plan, roles=Roles.FUSED, schedule=schedule, **options).clone()
        assert_close(fused, expected)
        again = case.run(plan, roles=Roles.FUSED, schedule=schedule, **options)
        assert torch.equal(again, fused), (number, schedule)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=["bf16", "fp16", "e4m3"]
)
def test_random_pages_return_without_touching_others(dtype: torch.dtype) -> None:
    source, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(10):
        num_pages, row = source.randint(1, 60), source.choice([(8, 128), (1, 576), (3, 5)])
        size = (num_pages, source.choice([1, 16, 64]), *row)
        buffers = [
            torch.randn(size, generator=generator).to(dtype).to(DEVICE)
            for _ in range(source.randint(1, 12))
        ]
        pages = torch.randperm(num_pages, generator=generator)[: source.randint(0, num_pages)]
        pages = pages.to(DEVICE, source.choice([torch.int32, torch.int64]))
        pool = PagedPool(buffers)
        slab = torch.full(pool.slab_shape(len(pages)), 0xA5, dtype=torch.uint8, device=DEVICE)
        gather(pool, pages, slab)
        copies = [torch.zeros_like(buffer) for buffer in buffers]
        scatter(slab, pages, PagedPool(copies))
        named = torch.zeros(num_pages, dtype=torch.bool, device=DEVICE)
        named[pages.long()] = True
        for buffer, copy in zip(buffers, copies, strict=True):
            of_pages = [t.view(torch.uint8).view(num_pages, -1) for t in (buffer, copy)]
            assert torch.equal(of_pages[0][named], of_pages[1][named])
            assert not of_pages[1][~named].any()
