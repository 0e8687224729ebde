"""The process that holds the pages: on its disk, behind page servers, and in memory for the plain
socket that these are measured against."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from peer_bench.pages import NAMESPACE, empty_run, fill_with, filled_run, is_filled_right
from sglang_tiered.checksummed import page_checksum
from sglang_tiered.integration.platforms.processes import keep_freed_memory
from sglang_tiered.sharing.page_source import PageSource, Place
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.wire.keys import PEER, load_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from multiprocessing.connection import Connection
    from pathlib import Path

    from sglang_tiered.storage.base import Page, Run


TIMEOUT_S = 120.0
PIECE_BYTES = 4 << 20
NUM_READS = 4


def cpu_seconds() -> float:
    """Of this process, all threads, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class MemoryReader:
    """Gives pages away that lie in memory: what the way costs without the disk."""

    is_pressed = False

    def __init__(self, run: Run) -> None:
        self._run = run
        self._places = {key: number for number, key in enumerate(run.keys)}
        self._checksums = [
            page_checksum(NAMESPACE, key, page)
            for key, page in zip(run.keys, run.pages, strict=True)
        ]

    def read(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        done: Callable[[MemoryPages | None], None],
    ) -> None:
        numbers = [self._places[key] for key in keys]
        size = lengths[0]
        places = [Place(number * size, size, self._checksums[number]) for number in numbers]
        done(MemoryPages(self._run.pages[0][0].obj, places))


class HostMemory:
    """Where a server has the pages in host memory, while ``is_on``."""

    def __init__(self, run: Run) -> None:
        self.is_on = False
        self._pages = dict(zip(run.keys, run.pages, strict=True))

    def knows(self, keys: Sequence[bytes]) -> bool:
        return self.is_on

    def find(self, keys: Sequence[bytes]) -> Sequence[Page] | None:
        return [self._pages[key] for key in keys] if self.is_on else None

    def forget(self, keys: Sequence[bytes]) -> None:
        raise AssertionError("a page in memory did not verify")


class MemoryPages:
    def __init__(self, memory: Any, places: Sequence[Place | None]) -> None:
        self.data = memoryview(memory)
        self.places = places

    def release(self) -> None: ...


def serve(pipe: Connection, directory: Path, keys: Path, page_bytes: int, num_bytes: int) -> None:
    """Says what it listens on and whether its reads are direct; then does what it is told."""
    keep_freed_memory()
    run, local = filled_run(page_bytes, num_bytes), empty_run(page_bytes, num_bytes)
    with ExitStack() as held:
        engine = RegionEngine(
            directory, namespace=NAMESPACE, capacity_bytes=2 * num_bytes + (512 << 20)
        )
        held.callback(engine.close)
        job = engine.submit_store(run)
        if not job.wait(TIMEOUT_S) or not all(job.ok) or not engine.flush(TIMEOUT_S):
            raise RuntimeError("the pages could not be stored")
        memory = HostMemory(run)
        engine.use_memory(memory)
        source = PageSource.of_region(engine, max_free_bytes=32 << 20)
        encrypted = load_keys(keys, PEER)
        servers = [
            PageServer(source, namespace=NAMESPACE),
            PageServer(source, namespace=NAMESPACE, keys=encrypted),
            PageServer(MemoryReader(run), namespace=NAMESPACE),
        ]
        for server in servers:
            held.callback(server.stop)
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        plain_file = _write_file(directory.with_suffix(".plain"), run)
        held.callback(os.close, plain_file)
        direct = getattr(engine._device, "direct", False)  # noqa: SLF001
        pipe.send((*(server.port for server in servers), listener.getsockname()[1], direct))
        connection, _ = listener.accept()
        held.callback(connection.close)
        while (order := pipe.recv()) != "stop":
            if order == "raw":
                _send(connection, run)
            elif order == "disk":
                _send_from(plain_file, connection, num_bytes)
            elif order.startswith("memory"):
                memory.is_on = order == "memory on"
            elif order == "local":
                pipe.send(_load(engine, local, run))
            elif order == "cpu":
                pipe.send(cpu_seconds())


def _send(connection: socket.socket, run: Run) -> None:
    for (page,) in run.pages:
        connection.sendall(page)


def _write_file(path: Path, run: Run) -> int:
    """The same bytes in a file of their own, open for direct reads where there are such."""
    path.write_bytes(b"".join(page for (page,) in run.pages))
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    return number


def _send_from(number: int, connection: socket.socket, num_bytes: int) -> None:
    """Send a file, read ahead by as many threads and in pieces as long as the page server's."""
    buffers = [aligned_buffer(PIECE_BYTES) for _ in range(NUM_READS)]
    with ThreadPoolExecutor(NUM_READS) as pool:
        starts = range(0, num_bytes, PIECE_BYTES)
        reads: deque[Future[int]] = deque()
        for index, start in enumerate([*starts, *[None] * NUM_READS]):
            if index >= NUM_READS and reads:
                size = reads.popleft().result()
                connection.sendall(buffers[index % NUM_READS][:size])
            if start is not None:
                buffer = buffers[index % NUM_READS]
                reads.append(pool.submit(os.preadv, number, [buffer], start))


def _load(engine: RegionEngine, local: Run, run: Run) -> Any:
    fill_with(local, 0)
    begun, cpu = time.perf_counter(), cpu_seconds()
    job = engine.submit_load(local)
    job.wait(TIMEOUT_S)
    seconds, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
    if set(job.reasons) != {Reason.OK} or not is_filled_right(local, run):
        return None
    return seconds, cpu
