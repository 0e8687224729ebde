"""Runs of pages: the same bytes from the same seed, and buffers to load them into."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from sglang_tiered.codecs import PageLayout
from sglang_tiered.storage.base import KEY_BYTES, Run
from sglang_tiered.storage.encoding import PageEncoding

NAMESPACE = b"\x11" * 32
OTHER_NAMESPACE = b"\x22" * 32

Sizes = Sequence[int | tuple[int, ...]]
MakeRun = Callable[[int, Sizes], Run]


def make_run(seed: int, sizes: Sizes) -> Run:
    """One page per size; a tuple is a page of several segments."""
    source = random.Random(seed)
    keys, pages = [], []
    for size in sizes:
        keys.append(source.randbytes(KEY_BYTES))
        segments = (size,) if isinstance(size, int) else size
        pages.append(tuple(memoryview(source.randbytes(nbytes)) for nbytes in segments))
    return Run(tuple(keys), tuple(pages))


def of(tenant: bytes, run: Run) -> Run:
    return Run(run.keys, run.pages, tenant)


def select(run: Run, positions: Sequence[int]) -> Run:
    keys = tuple(run.keys[position] for position in positions)
    return Run(keys, tuple(run.pages[position] for position in positions), run.tenant)


def make_soft_run(seed: int, sizes: Sizes) -> Run:
    """As ``make_run``, of pages that a codec makes shorter, as it does those of a model."""
    run = make_run(seed, sizes)
    return Run(run.keys, tuple(tuple(map(_softened, page)) for page in run.pages))


def _softened(segment: memoryview) -> memoryview:
    data = np.frombuffer(segment, np.uint8).copy()
    data[1::2] %= 4
    return memoryview(data.tobytes())


def soft_encoding(name: str = "zstd") -> PageEncoding:
    """What makes those pages shorter."""
    return PageEncoding(name, PageLayout.unknown("bfloat16"))


def blank(run: Run) -> Run:
    """The same keys with buffers of the same shape, filled with a byte that shows."""
    pages = tuple(
        tuple(memoryview(bytearray(b"\xa5" * segment.nbytes)) for segment in page)
        for page in run.pages
    )
    return Run(run.keys, pages)


def page_data(run: Run) -> list[bytes]:
    return [b"".join(page) for page in run.pages]
