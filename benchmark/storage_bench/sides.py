"""A store as the peers section sees it: durable stores, cold loads, and what they cost."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.base import Run
from storage_bench.keys import make_keys
from storage_bench.own_engine import PAGES_PER_RUN, empty, make_durable, open_engine, wait

if TYPE_CHECKING:
    from pathlib import Path

    from storage_bench.host_memory import HostPages


@dataclass
class Cost:
    """Wall seconds of each measured part, and processor seconds of all of them."""

    seconds: list[float]
    cpu_s: float

    @property
    def total_s(self) -> float:
        return sum(self.seconds)


class Side(ABC):
    """One store with all runs of a sample; ``source`` holds their pages, one after the other."""

    name: str
    buffered = False  # moves its bytes through the page cache

    @abstractmethod
    def forget(self, sample: int) -> None:
        """Remove what the sample before stored and get ready for this one. Not measured."""

    @abstractmethod
    def store(self) -> Cost:
        """Store every run of the sample, durable at the end: one measured part."""

    @abstractmethod
    def load(self) -> Cost:
        """Load the runs one after the other: one part each. Raises ``DifferentBytesError``."""

    @abstractmethod
    def close(self) -> None: ...


class OwnSide(Side):
    """The engine under test."""

    name = "own"

    def __init__(self, folder: Path, source: HostPages, target: HostPages) -> None:
        self._source, self._target = source, target
        self._engine = open_engine(folder, 2 * source.num_pages * source.page_bytes + (1 << 30))
        self._keys: list[tuple[bytes, ...]] = []

    def forget(self, sample: int) -> None:
        empty(self._engine)
        self._keys = _chains(self._source, sample)

    def store(self) -> Cost:
        runs = [
            Run(keys, self._source.pages[number * PAGES_PER_RUN :][:PAGES_PER_RUN])
            for number, keys in enumerate(self._keys)
        ]
        clock = _Clock()
        jobs = [self._engine.submit_store(run) for run in runs]
        for job in jobs:
            wait(job)
        make_durable(self._engine)
        return clock.stop()

    def load(self) -> Cost:
        runs = [Run(keys, self._target.pages) for keys in self._keys]
        total = Cost([], 0.0)
        for number, run in enumerate(runs):
            self._target.poison()
            clock = _Clock()
            wait(self._engine.submit_load(run))
            clock.stop(total)
            self._target.check_equal(0, self._source, number * PAGES_PER_RUN, PAGES_PER_RUN)
        return total

    def close(self) -> None:
        self._engine.close()


class HiCacheFileSide(Side):
    """SGLang's ``HiCacheFile``, by the calls its controller makes, in its batches.

    Pages go straight from and to the given memory. The controller itself copies each page once
    more on the way out and allocates, zeroes and copies one on the way in; neither is counted.
    """

    name = "hicache_file"
    buffered = True

    def __init__(self, folder: Path, source: HostPages, target: HostPages) -> None:
        self._folder = folder
        self._source, self._target = source, target
        self._backend = make_hicache_file(folder)
        self._keys: list[list[str]] = []

    def forget(self, sample: int) -> None:
        self._backend.clear()
        self._keys = [[key.hex() for key in chain] for chain in _chains(self._source, sample)]

    def store(self) -> Cost:
        batches = [
            (keys, self._source.tensors[number * PAGES_PER_RUN :][:PAGES_PER_RUN])
            for number, keys in enumerate(self._keys)
        ]
        clock = _Clock()
        for keys, tensors in batches:
            if not self._backend.batch_set(keys, tensors):
                raise RuntimeError("HiCacheFile failed to store")
        # All after all: the first makes one commit of the journal for many.
        for keys in self._keys:
            for key in keys:
                _sync(self._folder / f"{key}{self._backend.config_suffix}.bin")
        _sync(self._folder)
        return clock.stop()

    def load(self) -> Cost:
        total = Cost([], 0.0)
        for number, keys in enumerate(self._keys):
            self._target.poison()
            clock = _Clock()
            pages = self._backend.batch_get(keys, self._target.tensors)
            clock.stop(total)
            if any(page is None for page in pages):
                raise RuntimeError("HiCacheFile lost a page")
            self._target.check_equal(0, self._source, number * PAGES_PER_RUN, PAGES_PER_RUN)
        return total

    def close(self) -> None:
        pass


def make_hicache_file(folder: Path, **extra_config: Any) -> Any:
    """The backend as one rank of one makes it; settings of the environment do not reach it."""
    for name in [name for name in os.environ if name.startswith("SGLANG_HICACHE_FILE_BACKEND_")]:
        del os.environ[name]
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="model",
        extra_config=extra_config or None,
    )
    return HiCacheFile(config, str(folder))


class _Clock:
    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._start = time.perf_counter()

    def stop(self, into: Cost | None = None) -> Cost:
        """The cost since it was made, added as one more part where there are some already."""
        seconds = time.perf_counter() - self._start
        cost = into or Cost([], 0.0)
        cost.seconds.append(seconds)
        cost.cpu_s += time.process_time() - self._cpu_s
        return cost


def _chains(source: HostPages, sample: int) -> list[tuple[bytes, ...]]:
    num_runs = source.num_pages // PAGES_PER_RUN
    return [make_keys(f"{sample}/{number}", PAGES_PER_RUN) for number in range(num_runs)]


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
