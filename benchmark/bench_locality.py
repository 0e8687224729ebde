"""What servers that follow each other know: what a lookup costs, memory, and traffic.

Lookups run in memory, beside a thread that applies changes as the follower does. Then two servers
of this process follow each other over real sockets, with pages that are numbers.

    python benchmark/bench_locality.py [--peers N] [--pages N] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sglang_tiered.sharing.mirror import Mirror
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.sharing.settings import PageSettings, PeerSettings, Target
from sglang_tiered.sharing.sync import PeerSync
from sglang_tiered.sharing.telling import SIGN_OF_LIFE_S
from sglang_tiered.storage.promises import ended
from sglang_tiered.tools.machine import describe_machine, describe_versions

NAMESPACE, NOTHING = bytes(32), bytes(16)
NUM_KEYS = 1600
WAIT_S = 120.0
PAGES_PER_S = 200  # stored by each server, in the figure of traffic

if TYPE_CHECKING:
    from collections.abc import Callable


def random_pages(source: np.random.Generator, count: int) -> Any:
    return source.integers(1, 1 << 64, count, dtype=np.uint64)


def keys_of(pages: Any) -> list[bytes]:
    return [int(page).to_bytes(8, "little") + bytes(24) for page in pages]


def filled_mirror(num_peers: int, num_pages: int) -> tuple[Mirror, list[Any], list[Any], float]:
    """A mirror of servers with pages of their own, its peers, their pages, and the seconds."""
    source = np.random.default_rng(1)
    mirror = Mirror(
        num_peers * num_pages, 256, salt=1, digest=lambda: NOTHING, clock=time.monotonic
    )
    known, held, seconds = [], [], 0.0
    for number in range(num_peers):
        one: Any = mirror.join(f"{number:032x}", f"tcp://192.0.2.1:{number + 1}")
        one.is_live, one.digest = True, NOTHING
        pages = random_pages(source, num_pages)
        begun = time.perf_counter()
        mirror.loaded(one)  # or the last twentieth of the bound would not be for it
        mirror.add_pages(one, pages)
        seconds += time.perf_counter() - begun
        known.append(one)
        held.append(pages)
    return mirror, known, held, seconds


def lookups(mirror: Mirror, known: list[Any], held: list[Any], num_rounds: int) -> list[float]:
    """Seconds of lookups of pages that one server holds, while changes of others are applied."""
    source = np.random.default_rng(2)
    is_over = threading.Event()

    def apply() -> None:
        while not is_over.is_set():
            number = int(source.integers(len(known)))
            mirror.add_pages(known[number], random_pages(source, 100))
            mirror.remove_pages(known[number], held[number][:100])
            time.sleep(0.005)

    thread = threading.Thread(target=apply)
    thread.start()
    taken = []
    for number in range(num_rounds):
        keys = keys_of(held[number % len(held)][100 : 100 + NUM_KEYS])
        begun = time.perf_counter()
        found = mirror.find(keys)
        taken.append(time.perf_counter() - begun)
        assert None not in found, "a page that is held was not found"
    is_over.set()
    thread.join()
    return taken


class Held:
    """Pages that change when told."""

    def __init__(self, pages: Any) -> None:
        self.pages, self.version = pages, 1

    def add(self, pages: Any) -> None:
        self.pages, self.version = np.concatenate([self.pages, pages]), self.version + 1

    def __call__(self, version: int) -> Any:
        return None if version == self.version else (self.version, self.pages)


def following(num_pages: int, num_changes: int) -> tuple[float, list[float]]:
    """Seconds until another server finds all pages of one, and until it finds a change."""
    source = np.random.default_rng(3)
    pages = random_pages(source, num_pages)
    roster: list[Target] = []
    with ExitStack() as opened:
        stores = [Held(pages), Held(pages[:0])]
        syncs = []
        for held in stores:
            settings = PeerSettings(peers=roster)
            sync = PeerSync(
                settings,
                namespace=NAMESPACE,
                held=held,
                erase=lambda _: ended(True),
                notes=None,
            )
            server = PageServer(NoPages(), namespace=NAMESPACE, followers=sync.followers)
            opened.callback(server.stop)
            opened.callback(sync.close)
            roster.append(Target("127.0.0.1", server.port))
            syncs.append((sync, server))
        one, other = syncs[0][0], syncs[1][0]
        one.start(syncs[0][1], None, PageSettings(), None)
        until(lambda: one.followers.holdings.sequence > 0)
        begun = time.perf_counter()
        other.start(syncs[1][1], None, PageSettings(), None)
        last = keys_of(pages[-1:])
        until(partial(has_all, other.mirror, last))
        snapshot_s = time.perf_counter() - begun
        changes = []
        for _ in range(num_changes):
            new = random_pages(source, 100)
            begun = time.perf_counter()
            stores[0].add(new)
            until(partial(has_all, other.mirror, keys_of(new)))
            changes.append(time.perf_counter() - begun)
        return snapshot_s, changes


def has_all(mirror: Mirror, keys: list[bytes]) -> bool:
    return None not in mirror.find(keys)


class NoPages:
    is_pressed = False

    def read(self, keys: Any, lengths: Any, done: Callable[[None], None]) -> None:
        done(None)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + WAIT_S
    while not holds():
        if time.perf_counter() > deadline:
            raise TimeoutError("what was told was not heard")
        time.sleep(0.001)


def exchange_bytes() -> int:
    """Bytes of one question and its answer, with frames and headers of ZeroMQ, without pages."""
    most = (1 << 62) - 1
    follow = messages.Follow(NAMESPACE, NOTHING, NOTHING, NOTHING, most, most, None)
    changes = messages.Changes(
        NAMESPACE, NOTHING, NOTHING, most, most, None, None, 60_000, 0, False
    )
    frames = [messages.VERSION_FRAME, messages.encode(follow)]
    frames += [messages.VERSION_FRAME, messages.encode(changes)]
    return sum(len(frame) + 2 for frame in frames) + 9  # a payload's header is longer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--pages", type=int, default=62_500, help="of each of them")
    parser.add_argument("--quick", action="store_true", help="a quarter of the pages")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    num_pages = options.pages // 4 if options.quick else options.pages
    mirror, known, held, fill_s = filled_mirror(options.peers, num_pages)
    taken = lookups(mirror, known, held, 200)
    mirror_bytes = mirror._table.num_bytes  # noqa: SLF001
    snapshot_s, changes = following(num_pages, 10)
    others, exchange = options.peers - 1, exchange_bytes()
    raw = {
        "lookup_s": taken,
        "fill_s": fill_s,
        "mirror_bytes": mirror_bytes,
        "mirrored_pages": mirror.num_pages,
        "snapshot_s": snapshot_s,
        "change_s": changes,
        "idle_bytes_per_s": others * exchange / SIGN_OF_LIFE_S,
        "busy_bytes_per_s": others * (2 * exchange + 8 * PAGES_PER_S),
        "snapshot_bytes": others * 8 * num_pages,
    }
    table = Table(title=f"{options.peers} servers with {num_pages:,} pages each")
    table.add_column("what")
    table.add_column("measured", justify="right")
    rows = (
        (f"lookup of {NUM_KEYS:,} keys, median", f"{statistics.median(taken) * 1e6:,.0f} µs"),
        ("memory of the mirror", f"{mirror_bytes / mirror.num_pages:.1f} bytes a page"),
        ("pages taken up", f"{options.peers * num_pages / fill_s:,.0f} a second"),
        ("until another server finds all pages of one", f"{snapshot_s:.2f} s"),
        ("until it finds a change, median", f"{statistics.median(changes):.2f} s"),
        ("heard by a server of all others at rest", f"{raw['idle_bytes_per_s'] / 1e3:.1f} kB/s"),
        (
            f"the same, each storing {PAGES_PER_S} pages a second",
            f"{raw['busy_bytes_per_s'] / 1e3:.0f} kB/s",
        ),
        ("heard once, of all snapshots", f"{raw['snapshot_bytes'] / 1e6:.1f} MB"),
    )
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if options.json is not None:
        report = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {"peers": options.peers, "pages": num_pages},
            "ratios": {},
            "raw": raw,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
