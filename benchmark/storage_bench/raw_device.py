"""The device without a store: sequential ``O_DIRECT`` by ``fio``, or by own threads without it."""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from sglang_tiered.storage.region.device import aligned_buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


_PROBE_BYTES = 1 << 20
_ENGINES = ("io_uring", "libaio")


def make_file(path: Path, nbytes: int) -> None:
    """A new file whose space is reserved and not written, as the store makes its regions."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


class RawDevice:
    """Throughput in bytes per second at a block size and queue depth. ``name`` says by what."""

    def __init__(self, scratch: Path) -> None:
        self._fio = shutil.which("fio")
        self._engine = self._probe(scratch) if self._fio else None
        self.name = "own O_DIRECT threads, as fio is missing (package fio) or cannot run here"
        if self._engine:
            version = subprocess.run(
                ["fio", "--version"], capture_output=True, text=True, check=True
            )
            self.name = f"{version.stdout.strip()} {self._engine}"

    def write(self, path: Path, nbytes: int, block_bytes: int, depth: int) -> float:
        """Fill a file anew and make it durable. Its layout is not part of the time."""
        make_file(path, nbytes)
        if self._engine:
            return self._run_fio(self._engine, "write", [path], nbytes, block_bytes, depth)
        return _run_threads(os.pwritev, [path], nbytes, block_bytes, depth)

    def read(self, paths: Sequence[Path], nbytes: int, block_bytes: int, depth: int) -> float:
        """Read ``nbytes`` of each file in turn."""
        if self._engine:
            return self._run_fio(self._engine, "read", paths, nbytes, block_bytes, depth)
        return _run_threads(os.preadv, paths, nbytes, block_bytes, depth)

    def _probe(self, scratch: Path) -> str | None:
        """The first asynchronous engine that fio may use here: containers often forbid some."""
        path = scratch / "probe"
        for engine in _ENGINES:
            make_file(path, _PROBE_BYTES)
            try:
                self._run_fio(engine, "write", [path], _PROBE_BYTES, 4096, 1)
                return engine
            except (subprocess.CalledProcessError, ValueError, LookupError):
                continue
            finally:
                path.unlink()
        return None

    def _run_fio(
        self,
        engine: str,
        direction: str,
        paths: Sequence[Path],
        nbytes: int,
        block_bytes: int,
        depth: int,
    ) -> float:
        files = ":".join(str(path).replace(":", "\\:") for path in paths)
        command = [
            str(self._fio),
            "--name=raw",
            f"--filename={files}",
            f"--rw={direction}",
            f"--bs={block_bytes}",
            f"--size={nbytes * len(paths)}",
            "--file_service_type=sequential",
            "--direct=1",
            f"--ioengine={engine}",
            f"--iodepth={depth}",
            "--fallocate=none",
            "--thread",
            "--output-format=json",
            *(["--end_fsync=1"] if direction == "write" else ["--readonly"]),
        ]
        # Its memory in huge pages, as ours is: a disk is given every page by itself.
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        output = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout
        figures = json.loads(output)["jobs"][0][direction]
        if figures["io_bytes"] != nbytes * len(paths):
            raise ValueError(f"fio moved {figures['io_bytes']} of {nbytes * len(paths)} bytes")
        return float(figures["bw_bytes"])


def _run_threads(
    move: Callable[[int, list[memoryview], int], int],
    paths: Sequence[Path],
    nbytes: int,
    block_bytes: int,
    depth: int,
) -> float:
    direct = getattr(os, "O_DIRECT", 0)
    fds = [os.open(path, os.O_RDWR | direct) for path in paths]
    work = collections.deque((fd, at) for fd in fds for at in range(0, nbytes, block_bytes))
    failures: list[Exception] = []

    def run(buffer: memoryview) -> None:
        while not failures:
            try:
                fd, offset = work.popleft()
            except IndexError:
                return
            try:
                size = min(block_bytes, nbytes - offset)
                if move(fd, [buffer[:size]], offset) != size:
                    raise OSError("short I/O on the raw file")
            except Exception as error:
                failures.append(error)

    threads = []
    for _ in range(depth):
        buffer = aligned_buffer(block_bytes)
        buffer[:] = os.urandom(block_bytes)
        threads.append(threading.Thread(target=run, args=(buffer,)))
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if move is os.pwritev:
        for fd in fds:
            os.fsync(fd)
    seconds = time.perf_counter() - start
    for fd in fds:
        os.close(fd)
    if failures:
        raise failures[0]
    return nbytes * len(paths) / seconds
