"""Fixtures every test may use: a clean environment and deterministic runs of pages."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence

import pytest

from sglang_tiered.storage.base import KEY_BYTES, Run

Sizes = Sequence[int | tuple[int, ...]]
MakeRun = Callable[[int, Sizes], Run]


def pytest_configure() -> None:
    """A job that a script starts in the background inherits SIGINT as ignored, and every process
    that a test means to interrupt would too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's SGLANG_* variables must not decide what a test sees."""
    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def make_run() -> MakeRun:
    """``make_run(seed, sizes)``: one page per size; a tuple is a page of several segments. The
    same seed gives the same keys and bytes."""

    def make(seed: int, sizes: Sizes) -> Run:
        source = random.Random(seed)
        keys, pages = [], []
        for size in sizes:
            keys.append(source.randbytes(KEY_BYTES))
            segments = (size,) if isinstance(size, int) else size
            pages.append(tuple(memoryview(source.randbytes(nbytes)) for nbytes in segments))
        return Run(tuple(keys), tuple(pages))

    return make


@pytest.fixture
def blank() -> Callable[[Run], Run]:
    """The same keys with buffers of the same shape, filled with a byte that shows."""

    def make(run: Run) -> Run:
        pages = tuple(
            tuple(memoryview(bytearray(b"\xa5" * segment.nbytes)) for segment in page)
            for page in run.pages
        )
        return Run(run.keys, pages)

    return make


@pytest.fixture
def page_data() -> Callable[[Run], list[bytes]]:
    """The bytes of every page of a run."""

    def data(run: Run) -> list[bytes]:
        return [b"".join(page) for page in run.pages]

    return data
