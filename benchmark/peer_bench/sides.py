"""One server's pages in another: by way of the page client, a plain socket, or not at all."""

from __future__ import annotations

import multiprocessing
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from peer_bench import holder_process
from peer_bench.holder_process import TIMEOUT_S, cpu_seconds
from peer_bench.pages import (
    NAMESPACE,
    Samples,
    empty_run,
    fill_with,
    filled_run,
    is_filled_right,
)
from sglang_tiered.integration.platforms.processes import keep_freed_memory
from sglang_tiered.sharing.pages.client import PageClient
from sglang_tiered.storage.base import Job, JobKind
from sglang_tiered.wire.keys import PEER, load_keys
from storage_bench.figures import DifferentBytesError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path


RAW, RAW_DISK, LOCAL = "raw tcp", "raw tcp, from disk", "holder's own loads"
ORDERS = {RAW: "raw", RAW_DISK: "disk"}
PEER_PLAIN, PEER_KEYS, PEER_MEMORY = "peer", "peer, encrypted", "peer, from memory"
PEER_HOST = "peer, from host memory"


class Both:
    """This process and the holder's."""

    def __init__(
        self, held: ExitStack, directory: Path, keys: Path, page_bytes: int, num_bytes: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        process = context.Process(
            target=holder_process.serve,
            args=(theirs, directory, keys, page_bytes, num_bytes),
            daemon=True,
        )
        process.start()
        held.callback(process.join, TIMEOUT_S)
        held.callback(self._stop, self.pipe)
        if not self.pipe.poll(TIMEOUT_S):
            raise RuntimeError("the holder's process does not start")
        plain, encrypted, memory, raw, self.is_direct = self.pipe.recv()
        self.expected = filled_run(page_bytes, num_bytes)
        self.target = empty_run(page_bytes, num_bytes)
        self._connection = held.enter_context(socket.create_connection(("127.0.0.1", raw)))
        clients = {
            PEER_PLAIN: (PageClient(), plain),
            PEER_HOST: (PageClient(), plain),
            PEER_MEMORY: (PageClient(), memory),
            PEER_KEYS: (PageClient(keys=load_keys(keys, PEER)), encrypted),
        }
        for client, _ in clients.values():
            held.callback(client.close)
        self._clients = clients

    @staticmethod
    def _stop(pipe: Connection) -> None:
        try:
            pipe.send("stop")
        except OSError:
            return

    def turn(self, side: str) -> tuple[float, float]:
        """Seconds and CPU seconds of one round. Raises ``DifferentBytesError``."""
        if side == LOCAL:
            self.pipe.send("local")
            found = self.pipe.recv()
            if found is None:
                raise DifferentBytesError("the holder's own loads")
            return float(found[0]), float(found[1])
        fill_with(self.target, 0)
        self.pipe.send("memory on" if side == PEER_HOST else "memory off")
        theirs = self._holder_cpu()
        begun, cpu = time.perf_counter(), cpu_seconds()
        if side in ORDERS:
            self._raw(ORDERS[side])
        else:
            self._fetch(side)
        seconds, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
        cpu += self._holder_cpu() - theirs
        if not is_filled_right(self.target, self.expected):
            raise DifferentBytesError(f"what came by {side} is not what was stored")
        return seconds, cpu

    def _holder_cpu(self) -> float:
        self.pipe.send("cpu")
        return float(self.pipe.recv())

    def _raw(self, order: str) -> None:
        self.pipe.send(order)
        for (page,) in self.target.pages:
            at = 0
            while at < page.nbytes:
                at += self._connection.recv_into(page[at:])

    def _fetch(self, side: str) -> None:
        client, port = self._clients[side]
        job = Job(JobKind.LOAD, self.target)
        client.load(
            job,
            NAMESPACE,
            lambda keys, failed: [None if failed else f"tcp://127.0.0.1:{port}"] * len(keys),
            deadline_s=TIMEOUT_S,
            learn=lambda *_: None,
            over=lambda _: None,
        )
        if not (job.wait(TIMEOUT_S) and all(job.ok)):
            raise DifferentBytesError(f"{side} did not bring every page")


def measure(
    directory: Path, keys: Path, page_bytes: int, num_bytes: int, num_rounds: int
) -> tuple[dict[str, Samples], bool]:
    """Samples of each side, in turns, and whether the holder's reads pass the page cache by. The
    first turn of each, which connects, is not counted."""
    keep_freed_memory()  # as in a server
    samples = {
        name: Samples()
        for name in (PEER_PLAIN, RAW, LOCAL, PEER_MEMORY, RAW_DISK, PEER_HOST, PEER_KEYS)
    }
    with ExitStack() as held:
        both = Both(held, directory, keys, page_bytes, num_bytes)
        names = list(samples)
        for number in range(num_rounds + 1):
            for index in range(len(names)):  # everyone goes first in turn
                name = names[(index + number) % len(names)]
                seconds, cpu = both.turn(name)
                if number:
                    samples[name].seconds.append(seconds)
                    samples[name].cpu.append(cpu)
        return samples, both.is_direct
