"""The locality index: what a lookup costs, and what sharing costs Redis and the network.

Lookups run in memory, beside a thread that applies changes as the index' own does. The rest runs
two indexes of this process and a real Redis, whose program ``scripts/redis-server`` finds.

    python benchmark/bench_locality.py [--peers N] [--pages N] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import redis
from rich.console import Console
from rich.table import Table

from sglang_tiered.sharing.locality.formats import ServerRecord
from sglang_tiered.sharing.locality.index import LocalityIndex
from sglang_tiered.sharing.locality.mirror import Mirror
from sglang_tiered.sharing.settings import PeerSettings
from sglang_tiered.storage.promises import ended
from sglang_tiered.tools.machine import describe_machine, describe_versions

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = bytes(32)
NUM_KEYS = 1600
WAIT_S = 120.0


class Store:
    """Pages that change when told."""

    def __init__(self, pages: Any) -> None:
        self.pages, self.version = pages, 1

    def replace(self, pages: Any) -> None:
        self.pages, self.version = pages, self.version + 1

    def held(self, version: int) -> Any:
        return None if version == self.version else (self.version, self.pages)


def random_pages(source: np.random.Generator, count: int) -> Any:
    return source.integers(1, 1 << 64, count, dtype=np.uint64)


def keys_of(pages: Any) -> list[bytes]:
    return [page.to_bytes(8, "little") + bytes(24) for page in pages.tolist()]


def measure_lookups(num_peers: int, num_pages: int, rounds: int) -> dict[str, Any]:
    """Seconds of each lookup by case, of the largest table, and bytes of it."""
    source = np.random.default_rng(0)
    names = [f"{number:032x}" for number in range(num_peers)]
    records = [ServerRecord(NAMESPACE, n, 1, 1, 1, 0, bytes(16), "tcp://h:1") for n in names]
    mirror = Mirror(
        2 * num_peers * num_pages, 1024, salt=1, digest=lambda: bytes(16), clock=time.monotonic
    )
    mirror.update(records, time.monotonic() + 1e6)
    shared = random_pages(source, num_pages // 2)  # half of the pages are everybody's
    held = []
    began = time.perf_counter()
    for known in mirror.peers:
        held.append(np.concatenate([shared, random_pages(source, num_pages - len(shared))]))
        mirror.add_pages(known, held[-1])
        mirror.loaded(known, 1)
    load_s = time.perf_counter() - began

    def span(first: int, count: int) -> Any:
        start = first + int(source.integers(num_pages // 2 - count))
        return held[int(source.integers(num_peers))][start : start + count]

    cases: dict[str, Callable[[], Any]] = {
        "all held by one": lambda: span(num_pages // 2, NUM_KEYS),
        "all held by everybody": lambda: span(0, NUM_KEYS),
        "half held": lambda: np.concatenate(
            [span(num_pages // 2, NUM_KEYS // 2), random_pages(source, NUM_KEYS // 2)]
        ),
        "none held": lambda: random_pages(source, NUM_KEYS),
    }
    seconds: dict[str, list[float]] = {}
    for is_busy in (False, True):
        done = threading.Event()

        def change(until: threading.Event = done) -> None:
            while not until.is_set():
                known = mirror.peers[0]
                pages = random_pages(source, 1000)
                mirror.add_pages(known, pages)
                mirror.remove_pages(known, pages)
                until.wait(0.1)

        if is_busy:
            threading.Thread(target=change).start()
        for name, draw in cases.items():
            samples = seconds.setdefault(name + (", changes beside" if is_busy else ""), [])
            for _ in range(rounds):
                keys = keys_of(draw())
                began = time.perf_counter()
                mirror.find(keys)
                samples.append(time.perf_counter() - began)
        done.set()
    figures = mirror.figures()
    return {
        "seconds": seconds,
        "load_s": load_s,
        "mirrored_pages": figures[2],
        "mirror_bytes": figures[4],
    }


def measure_sharing(num_pages: int, rounds: int) -> dict[str, Any]:
    source = np.random.default_rng(1)
    store = Store(random_pages(source, num_pages))
    program = subprocess.run(
        [ROOT / "scripts/redis-server"], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/redis.sock"
        command = [program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            return _share(path, store, source, rounds)
        finally:
            process.kill()
            process.wait()


def _share(path: str, store: Store, source: np.random.Generator, rounds: int) -> dict[str, Any]:
    client = redis.Redis(unix_socket_path=path)
    _until(lambda: os.path.exists(path) and client.ping())
    settings = PeerSettings(index_url=f"unix://{path}")
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "erase_wanted": lambda _: ended(True),
    }
    reader = LocalityIndex(settings, held=Store(random_pages(source, 1)).held, **options)
    reader.announce("tcp://127.0.0.1:2")
    _until(lambda: reader.stats().connected)
    before, began = _traffic(client), time.perf_counter()
    writer = LocalityIndex(settings, held=store.held, **options)
    writer.announce("tcp://127.0.0.1:1")
    last = keys_of(np.sort(store.pages)[-1:])
    _until(lambda: reader.find(last) != [None])
    snapshot_s, snapshot_bytes = time.perf_counter() - began, _traffic(client) - before
    redis_bytes = sum(client.memory_usage(key) or 0 for key in client.keys("*"))
    latencies = []
    before = _traffic(client)
    for _ in range(rounds):
        new = random_pages(source, 1000)
        store.replace(np.concatenate([store.pages[1000:], new]))
        changed = time.perf_counter()
        _until(lambda new=new: None not in reader.find(keys_of(new)))
        latencies.append(time.perf_counter() - changed)
    change_bytes = (_traffic(client) - before) / (2000 * rounds)
    before, began = _traffic(client), time.perf_counter()
    time.sleep(10.0)  # the idle traffic is measured over time
    idle = (_traffic(client) - before) / (time.perf_counter() - began)
    writer.close()
    reader.close()
    return {
        "snapshot_s": snapshot_s,
        "snapshot_bytes_per_page": snapshot_bytes / len(store.pages),
        "redis_bytes_per_page": redis_bytes / len(store.pages),
        "change_s": latencies,
        "change_bytes_per_page": change_bytes,
        "idle_bytes_per_s": idle / 2,
    }


def _traffic(client: redis.Redis) -> int:
    stats = client.info("stats")
    return int(stats["total_net_input_bytes"]) + int(stats["total_net_output_bytes"])


def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError("the index did not get there")
        time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=16, help="other servers (16)")
    parser.add_argument("--pages", type=int, default=262_144, help="pages of each (262,144)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write figures there")
    arguments = parser.parse_args()
    if arguments.peers < 1 or arguments.pages < 4 * NUM_KEYS:
        parser.error(f"--peers must be at least 1 and --pages {4 * NUM_KEYS}")
    rounds = 300 if arguments.quick else 2000
    lookups = measure_lookups(arguments.peers, arguments.pages, rounds)
    sharing = measure_sharing(arguments.pages, 5 if arguments.quick else 20)
    console = Console()
    table = Table("lookup of 1,600 keys", "p50", "p99", title="memory only")
    for name, samples in lookups["seconds"].items():
        ordered = sorted(samples)
        p50, p99 = statistics.median(ordered), ordered[int(0.99 * len(ordered))]
        table.add_row(name, f"{1e6 * p50:.0f} µs", f"{1e6 * p99:.0f} µs")
    console.print(table)
    per_page = lookups["mirror_bytes"] / lookups["mirrored_pages"]
    console.print(
        f"{lookups['mirrored_pages']:,} pages mirrored in {lookups['load_s']:.1f} s, "
        f"{per_page:.0f} bytes each"
    )
    console.print({name: value for name, value in sharing.items() if name != "change_s"})
    console.print(f"a change is found after {statistics.median(sharing['change_s']):.2f} s")
    if arguments.json is not None:
        result = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {"peers": arguments.peers, "pages": arguments.pages, "rounds": rounds},
            "ratios": {},
            "raw": {"lookups": lookups, "sharing": sharing},
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
