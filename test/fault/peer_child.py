"""A server that shares its pages, in a process of its own, and one in the test's.

``python -m peer_child PORTS DIRECTORY SEED SIZE COUNT`` opens a store with the pages that
``stored_run`` makes of these, and its peer tier, which follows the servers at these ports of this
machine.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from line_process import LineProcess
from page_peers import DEADLINE_S, HOST, NAMESPACE, make_pages
from peer_servers import quick

from kit.waiting import eventually
from sglang_tiered.sharing.addresses import Target
from sglang_tiered.sharing.peer_tier import PeerTier
from sglang_tiered.storage.base import Reason, Run
from sglang_tiered.storage.region import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

MiB = 1 << 20


def stored_run(seed: int, size: int, count: int) -> Run:
    pages = make_pages(seed, [size] * count)
    return Run(tuple(pages), tuple((memoryview(page),) for page in pages.values()))


def blank_run(seed: int, size: int, count: int) -> Run:
    keys = stored_run(seed, size, count).keys
    return Run(keys, tuple((memoryview(bytearray(b"\xa5" * size)),) for _ in keys))


class Sharer:
    """A store and its peer tier, which finds others by the ``roster``, where it is too."""

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
        self.tier = PeerTier(
            quick(roster, keys_directory=keys or None, **changes),
            namespace=namespace,
            region=self.region,
            erase=self.region.erase,
        )
        self.target = Target(HOST, self.tier.port)
        roster.append(self.target)
        self._roster = roster

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


class SharerProcess(LineProcess):
    """The same in a process of its own, which follows those that are in the roster now."""

    def __init__(self, roster: list[Target], directory: Path, *run: int) -> None:
        ports = ",".join(str(target.port) for target in roster)
        super().__init__("peer_child", ports, directory, *run)
        roster.append(Target(HOST, int(self.line())))


def main(ports: str, directory: str, *run: str) -> None:
    roster = [Target(HOST, int(port)) for port in ports.split(",") if port]
    with sharer(roster, Path(directory)) as one:
        one.store(stored_run(*map(int, run)))
        print(one.tier.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
