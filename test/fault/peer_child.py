"""A server that shares its pages, in a process of its own, and one in the test's.

``python -m peer_child PORTS DIRECTORY KEYS`` opens a store and its peer tier, which follows the
servers at these ports of this machine, and does what it is told by lines: ``store SEED SIZE
COUNT``, ``load SEED SIZE COUNT``, ``served``, ``exit``.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from page_peers import DEADLINE_S, HOST, NAMESPACE, FrozenProcess, make_pages
from peer_servers import quick

from kit.waiting import eventually
from sglang_tiered.sharing.addresses import Target
from sglang_tiered.sharing.peer_tier import PeerTier
from sglang_tiered.storage.base import Erasure, Reason, Run
from sglang_tiered.storage.region import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

MiB = 1 << 20


def stored_run(seed: int, size: int, count: int) -> Run:
    pages = make_pages(seed, [size] * count)
    return Run(tuple(pages), tuple((memoryview(page),) for page in pages.values()))


def blank_run(seed: int, size: int, count: int) -> Run:
    keys = stored_run(seed, size, count).keys
    return Run(keys, tuple((memoryview(bytearray(b"\xa5" * size)),) for _ in keys))


class Sharer:
    """A store and its peer tier, which finds others by the ``roster``, where it is too. ``purged``
    are the tenants that others told it to forget."""

    def __init__(
        self,
        roster: list[Target],
        directory: Path,
        *,
        namespace: bytes = NAMESPACE,
        keys: str = "",
        **changes: object,
    ) -> None:
        self.region = RegionEngine(
            directory, namespace=namespace, capacity_bytes=256 * MiB, region_bytes=32 * MiB
        )
        self.purged: list[bytes | None] = []
        self.tier = PeerTier(
            quick(roster, keys_directory=keys or None, **changes),
            namespace=namespace,
            region=self.region,
            erase=self._erase,
        )
        self.target = Target(HOST, self.tier.port)
        roster.append(self.target)
        self._roster = roster

    def _erase(self, what: Erasure) -> Future[bool]:
        if what.keys is None:
            self.purged.append(what.tenant)
        return self.region.erase(what)

    def store(self, run: Run) -> None:
        job = self.region.submit_store(run)
        assert job.wait(DEADLINE_S)
        assert set(job.reasons) <= {Reason.OK, Reason.DUPLICATE}

    def load(self, run: Run, deadline_s: float | None = DEADLINE_S) -> list[Reason]:
        job = self.tier.submit_load(run, deadline_s=deadline_s)
        assert job.wait(DEADLINE_S)
        return job.reasons

    def finds(self, keys: tuple[bytes, ...]) -> None:
        """Wait until their holder has told of them."""
        eventually(lambda: all(self.tier.contains(keys)))

    def close(self) -> None:
        self._roster.remove(self.target)
        self.tier.close()
        self.region.close()


@contextmanager
def sharer(roster: list[Target], directory: Path, **options: object) -> Iterator[Sharer]:
    one = Sharer(roster, directory, **options)
    try:
        yield one
        eventually(lambda: not one.tier.stats().num_inflight_jobs)
        one.tier.check_integrity()
    finally:
        one.close()


class SharerProcess(FrozenProcess):
    """The same in a process of its own, which follows those that are in the roster now."""

    def __init__(self, roster: list[Target], directory: Path, keys: str = "") -> None:
        ports = ",".join(str(target.port) for target in roster)
        super().__init__("peer_child", ports, directory, keys)
        roster.append(Target(HOST, int(self.line())))

    def ask(self, order: str) -> str:
        self.tell(order)
        return self.line()


def main(ports: str, directory: str, keys: str) -> None:
    roster = [Target(HOST, int(port)) for port in ports.split(",") if port]
    with sharer(roster, Path(directory), keys=keys) as one:
        print(one.tier.port, flush=True)
        for line in sys.stdin:
            verb, *numbers = line.split()
            values = [int(number) for number in numbers]
            if verb == "exit":
                return
            if verb == "store":
                one.store(stored_run(*values))
                print(one.tier.refresh(DEADLINE_S), flush=True)
            elif verb == "load":
                run = stored_run(*values)
                one.finds(run.keys)
                target = blank_run(*values)
                reasons = one.load(target)
                same = all(
                    bytes(ours[0]) == bytes(theirs[0])
                    for ours, theirs in zip(target.pages, run.pages, strict=True)
                )
                print(same and set(reasons) == {Reason.OK}, flush=True)
            elif verb == "served":
                deadline = time.monotonic() + DEADLINE_S
                while one.tier.stats().serving_bytes and time.monotonic() < deadline:
                    time.sleep(0.01)
                print(one.tier.stats().num_served, one.tier.stats().serving_bytes, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
