"""``bench``: a short throughput test of the real engine where DIR is.

Answers "is this disk any good for the tier", nothing else: what is compared with what, and how,
is the business of ``benchmark/bench_storage.py``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.config import (
    KiB,
    MiB,
    default_region_bytes,
    format_bytes,
    parse_bytes,
)
from sglang_tiered.errors import ConfigError, StoreError
from sglang_tiered.storage.base import KEY_BYTES, JobKind, Run
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice, aligned_buffer
from sglang_tiered.tools.store.holder import find_holder
from sglang_tiered.tools.terminal import note, print_lines, print_table, write_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from sglang_tiered.storage.base import Job

__all__ = ["run"]

PREFIX = "sglang-tiered-bench-"
PAGE_BYTES = (256 * KiB, MiB)
MIN_BYTES = 16 * MiB
_NOT_A_COMPARISON = (
    "one short run of the engine alone: not a comparison, that is benchmark/bench_storage.py"
)
_NAMESPACE = bytes(32)
_MEMORY_BYTES = 64 * MiB
_JOBS_IN_FLIGHT = 4
_TIMEOUT_S = 300.0


def run(arguments: argparse.Namespace) -> int:
    nbytes = parse_bytes("--bytes", arguments.bytes, otherwise="leave it out for 1GiB")
    if nbytes < MIN_BYTES:
        raise ConfigError(
            f"--bytes {arguments.bytes} is too little to measure; pass {format_bytes(MIN_BYTES)} "
            "or more"
        )
    directory: Path = arguments.directory
    _check_space(directory, nbytes)
    holder = find_holder(directory)
    if holder.held:
        note(f"{directory} is {holder}: it and this test slow each other down")
    samples = []
    with _ending_by_signals(), _folder(directory) as folder:
        for page_bytes in PAGE_BYTES:
            shard = folder / f"pages-{page_bytes}"
            shard.mkdir()
            samples.append(_measure(shard, page_bytes, nbytes))
            for file in shard.iterdir():
                file.unlink()
    report = {
        "directory": str(directory),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "bytes": nbytes,
        "samples": samples,
        "note": _NOT_A_COMPARISON,
    }
    if arguments.json:
        write_json(report)
    else:
        _show(report)
    return 0


def _check_space(directory: Path, nbytes: int) -> None:
    """The files take what is stored, a region more and some headers."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be used ({error.strerror}); pass a writable directory"
        ) from error
    free = status.f_bavail * status.f_frsize
    needed = nbytes + nbytes // 50 + 2 * default_region_bytes(2 * nbytes)
    if free < needed:
        raise StoreError(
            f"{directory} has {format_bytes(free)} free, but --bytes {format_bytes(nbytes)} needs "
            f"{format_bytes(needed)}; pass less, or another directory"
        )


@contextlib.contextmanager
def _folder(directory: Path) -> Iterator[Path]:
    """A directory of our own in there, removed however this ends."""
    try:
        folder = tempfile.TemporaryDirectory(
            prefix=PREFIX, dir=directory, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be written ({error.strerror}); pass a writable directory"
        ) from error
    with folder as name:
        yield Path(name)


@contextlib.contextmanager
def _ending_by_signals() -> Iterator[None]:
    """Being told to end is as Ctrl-C: the files go."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    try:
        before = [signal.signal(number, interrupt) for number in numbers]
    except ValueError:  # not the main thread, which gets no signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _measure(shard: Path, page_bytes: int, nbytes: int) -> dict[str, Any]:
    device = FileDevice(shard)
    num_pages = nbytes // page_bytes
    memory = _pages(page_bytes, min(_MEMORY_BYTES, num_pages * page_bytes))
    runs = _runs(num_pages, memory)
    capacity = 2 * nbytes + nbytes // 50  # nothing is evicted
    engine = RegionEngine(
        shard,
        namespace=_NAMESPACE,
        capacity_bytes=capacity,
        region_bytes=default_region_bytes(2 * nbytes),
        device=device,
    )
    try:
        stored = _timed(engine, JobKind.STORE, runs)
        _drop_cache(shard)
        loaded = _timed(engine, JobKind.LOAD, runs)
    finally:
        engine.close()
    return {
        "page_bytes": page_bytes,
        "pages": num_pages,
        "io": "direct" if device.direct else "buffered",
        "store": stored,
        "load": loaded,
    }


def _pages(page_bytes: int, nbytes: int) -> list[memoryview]:
    """Memory as a host pool has it, filled with what no device can shrink."""
    buffer = aligned_buffer(nbytes)
    for start in range(0, nbytes, MiB):
        piece = buffer[start : start + MiB]
        piece[:] = os.urandom(piece.nbytes)
    return [buffer[i : i + page_bytes] for i in range(0, nbytes - page_bytes + 1, page_bytes)]


def _runs(num_pages: int, memory: Sequence[memoryview]) -> list[Run]:
    """All pages, in runs on the memory in turn; runs in flight together share none of it."""
    length = max(len(memory) // _JOBS_IN_FLIGHT, 1)
    num_slots = len(memory) // length
    runs: list[Run] = []
    while num_pages:
        count = min(length, num_pages)
        slot = len(runs) % num_slots * length
        keys = tuple(os.urandom(KEY_BYTES) for _ in range(count))
        runs.append(Run(keys, tuple((page,) for page in memory[slot : slot + count])))
        num_pages -= count
    return runs


def _timed(engine: RegionEngine, kind: JobKind, runs: Sequence[Run]) -> dict[str, float]:
    """A store counts as finished when it is durable."""
    submit = engine.submit_store if kind is JobKind.STORE else engine.submit_load
    wall, cpu = time.perf_counter(), time.process_time()
    jobs: deque[Job] = deque()
    for run_ in runs:
        if len(jobs) == _JOBS_IN_FLIGHT:
            _finish(jobs.popleft())
        jobs.append(submit(run_))
    for job in jobs:
        _finish(job)
    if kind is JobKind.STORE and not engine.flush(_TIMEOUT_S):
        raise StoreError("the pages could not be made durable; see the log of the kernel")
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    gigabytes = sum(run_.num_bytes for run_ in runs) / 1e9
    return {
        "gb_per_s": gigabytes / seconds,
        "cpu_s_per_gb": cpu_seconds / gigabytes,
        "seconds": seconds,
    }


def _finish(job: Job) -> None:
    if not job.wait(_TIMEOUT_S):
        raise StoreError(f"a {job.kind.value} took more than {_TIMEOUT_S:.0f} s; the device hangs")
    if not all(job.ok):
        reasons = ", ".join(sorted({reason.value for reason in job.reasons}))
        raise StoreError(f"a {job.kind.value} ended with {reasons}; check the device")


def _drop_cache(shard: Path) -> None:
    """Where I/O is buffered, loads shall not be served from memory."""
    for file in shard.glob("region-*"):
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _show(report: dict[str, Any]) -> None:
    rows = []
    for sample in report["samples"]:
        for kind in ("store", "load"):
            figures = sample[kind]
            rows.append(
                [
                    f"{kind}, durable" if kind == "store" else f"{kind}, verified",
                    sample["io"],
                    format_bytes(sample["page_bytes"]),
                    f"{figures['gb_per_s']:.2f}",
                    f"{figures['cpu_s_per_gb']:.3f}",
                    f"{figures['seconds']:.2f}",
                ]
            )
    print_lines(
        [
            f"{report['directory']}: {format_bytes(report['bytes'])} each way; {report['machine']}",
            "",
        ]
    )
    print_table(["what", "I/O", "page", "GB/s", "CPU s/GB", "seconds"], rows, left=2)
    print_lines(["", report["note"]])
