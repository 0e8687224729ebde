"""LMCache's local backends, driven by its own Python: a line of JSON in, a line of JSON out.

Run by ``lmcache_side`` only. The adapters are called as LMCache's controllers call them: submit a
batch, wait on the event descriptor, take the result. Nothing of this project is imported here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"
# Torch's memory in huge pages: a disk is given every page by itself, and our side has huge ones.
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_BYTES = 4096
TIMEOUT_S = 120.0
RAW_METADATA_BYTES = 64 << 20
RAW_FILE = "slots"


class Backend:
    """One adapter over a folder, with pages for all runs of a sample and one run to load into."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._kind: str = order["kind"]
        self._folder: str = order["folder"]
        self._page_bytes: int = order["page_bytes"]
        self._pages_per_run: int = order["pages_per_run"]
        self._num_runs: int = order["num_runs"]
        self._depths = {"readers": order["num_readers"], "writers": order["num_writers"]}
        num_pages = self._pages_per_run * (self._num_runs + 1)
        memory = torch.empty(num_pages * self._page_bytes + BLOCK_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % BLOCK_BYTES
        self._memory = memory[start : start + num_pages * self._page_bytes]
        torch.manual_seed(self._page_bytes)
        self._memory.random_(0, 256)
        objects = [self._object(number) for number in range(num_pages)]
        size = self._pages_per_run
        runs = [objects[i : i + size] for i in range(0, num_pages, size)]
        self._sources, self._target = runs[:-1], runs[-1]
        self._adapter: Any = None
        self._keys: list[list[ObjectKey]] = []

    def forget(self, sample: int) -> dict[str, Any]:
        if self._adapter is not None:
            self._adapter.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.makedirs(self._folder)
        self._adapter = create_l2_adapter(
            self._config(),
            l1_memory_desc=L1MemoryDesc(
                ptr=self._memory.data_ptr(), size=self._memory.numel(), align_bytes=BLOCK_BYTES
            ),
        )
        self._keys = [
            [
                ObjectKey(
                    chunk_hash=hashlib.sha256(f"{sample}/{run}/{page}".encode()).digest(),
                    model_name="model",
                    kv_rank=0,
                )
                for page in range(self._pages_per_run)
            ]
            for run in range(self._num_runs)
        ]
        return {}

    def store(self) -> dict[str, Any]:
        cpu_s, start = time.process_time(), time.perf_counter()
        pending = {
            self._adapter.submit_store_task(keys, objects)
            for keys, objects in zip(self._keys, self._sources, strict=True)
        }

        def collect() -> None:
            for task, result in self._adapter.pop_completed_store_tasks().items():
                if not result.is_successful():
                    raise RuntimeError(f"{self._kind} failed to store")
                pending.discard(task)

        _wait(self._adapter.get_store_event_fd(), collect, pending)
        for entry in os.scandir(self._folder):
            _sync(entry.path)
        _sync(self._folder)
        seconds = time.perf_counter() - start
        return {"seconds": [seconds], "cpu_s": time.process_time() - cpu_s}

    def load(self) -> dict[str, Any]:
        parts: list[float] = []
        cpu_s = 0.0
        for keys, expected in zip(self._keys, self._sources, strict=True):
            for page in self._target:
                page.raw_data.fill_(0xA5)
            cpu, start = time.process_time(), time.perf_counter()
            task = self._adapter.submit_load_task(keys, self._target)
            pending = {task}

            def collect(task: int = task, pending: set[int] = pending) -> None:
                result = self._adapter.query_load_result(task)
                if result is not None:
                    if result.popcount() != self._pages_per_run:
                        raise RuntimeError(f"{self._kind} lost a page")
                    pending.discard(task)

            _wait(self._adapter.get_load_event_fd(), collect, pending)
            parts.append(time.perf_counter() - start)
            cpu_s += time.process_time() - cpu
            for got, stored in zip(self._target, expected, strict=True):
                if not torch.equal(got.raw_data, stored.raw_data):
                    return {"different": True}
        return {"seconds": parts, "cpu_s": cpu_s}

    def close(self) -> dict[str, Any]:
        if self._adapter is not None:
            self._adapter.close()
        return {}

    def _object(self, number: int) -> TensorMemoryObj:
        start = number * self._page_bytes
        page = self._memory[start : start + self._page_bytes]
        metadata = MemoryObjMetadata(
            shape=page.shape,
            dtype=page.dtype,
            address=start,
            phy_size=self._page_bytes,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        return TensorMemoryObj(raw_data=page, metadata=metadata, parent_allocator=None)

    def _config(self) -> Any:
        if self._kind == "fs":
            return FSL2AdapterConfig(self._folder, use_odirect=True)
        if self._kind == "fs_native":
            return FSNativeL2AdapterConfig(
                self._folder, num_workers=self._depths["readers"], use_odirect=True
            )
        from lmcache.v1.distributed.l2_adapters.raw_block_l2_adapter import (
            RawBlockL2AdapterConfig,
        )

        slot_bytes = self._page_bytes + BLOCK_BYTES
        path = os.path.join(self._folder, RAW_FILE)
        num_slots = self._pages_per_run * self._num_runs + 1
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, RAW_METADATA_BYTES + num_slots * slot_bytes)
        return RawBlockL2AdapterConfig(
            device_path=path,
            slot_bytes=slot_bytes,
            meta_total_bytes=RAW_METADATA_BYTES,
            num_store_workers=self._depths["writers"],
            num_load_workers=self._depths["readers"],
        )


def _wait(event_fd: int, collect: Callable[[], None], pending: set[int]) -> None:
    poller = select.poll()
    poller.register(event_fd, select.POLLIN)
    while pending:
        if not poller.poll(TIMEOUT_S * 1e3):
            raise RuntimeError(f"LMCache did not finish within {TIMEOUT_S:.0f} s")
        consume_fd(event_fd)
        collect()


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def main() -> None:
    backend: Backend | None = None
    # LMCache logs to the standard output, which is ours to answer on.
    with os.fdopen(os.dup(1), "w") as answers, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        for line in sys.stdin:
            order = json.loads(line)
            call = order.pop("call")
            try:
                if call == "open":
                    backend, answer = Backend(order), {}
                else:
                    assert backend is not None, "the first call is open"
                    answer = getattr(backend, call)(**order)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
