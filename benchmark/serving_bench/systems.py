"""The systems under comparison: how each is launched, and what it tells about its tiers."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from server_process import Server
from serving_bench.processor_time import naming_threads
from serving_bench.setting import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from serving_bench.setting import Geometry


SYSTEMS = ("stock", "hicache-host", "hicache-file", "tiered")
# The tiers with another policy, of single scenarios, never chosen by name: every load is made; a
# prefix is loaded or computed, never both at once; and NVMe has pages in fewer bytes, exactly.
ALWAYS = "tiered-always"
ONE_END = "tiered-one-end"
ENCODED = "tiered-zstd"
POLICIES: dict[str, list[str]] = {
    "tiered": [],
    ALWAYS: ["--tier-load", "always"],
    ONE_END: ["--tier-both-ends", "off"],
    ENCODED: ["--tier-codec", "zstd"],
}
# With as many OpenMP threads as cores, GNU OpenMP spins at every barrier, which costs whole time
# slices where anything else wants a core; it seems to stop doing so once a second thread of the
# process computes, as HiCache's storage thread does and stock SGLang has none to do. Equal for all.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
START_DEADLINE_S = 420.0  # four at once on two busy cores

_HOST_POOL = re.compile(r"Allocating kv hierarchical KV host pool: (\d+) tokens")
_METRIC = re.compile(r"^(sglang:[a-z_]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class UnequalSystemsError(Exception):
    """The systems did not get the memory they were to be compared with. One sentence."""


def launch_arguments(
    name: str, geometry: Geometry, folder: Path, extra: Sequence[str] = ()
) -> list[str]:
    """Flags of ``sglang_tiered.launch_server``; ``--tier-mode off`` is stock SGLang on the same
    platform. The host tier is sized by ratio in all of them, for SGLang's own flag counts whole
    gigabytes. Metrics are on in all, for the plot of occupancy."""
    common = [
        *("--max-total-tokens", str(geometry.device_tokens)),
        *("--page-size", str(PAGE_SIZE)),
        "--enable-metrics",
        *extra,
    ]
    host = ["--hicache-ratio", str(geometry.host_ratio)]
    if name in POLICIES:
        store = ["--tier-dir", str(folder / name), "--tier-nvme-bytes", str(geometry.nvme_bytes)]
        return [*common, *host, *store, *POLICIES[name]]
    common += ["--tier-mode", "off"]
    if name == "stock":
        return common
    hierarchy = [
        *common,
        "--enable-hierarchical-cache",
        *host,
        *("--hicache-io-backend", "direct"),
        *("--hicache-mem-layout", "page_first_direct"),
    ]
    if name == "hicache-host":
        return hierarchy
    settings = {"file_storage_path": str(folder / name), "max_size": geometry.nvme_bytes}
    return [
        *hierarchy,
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", json.dumps(settings)),
    ]


@dataclass
class System:
    """One launched system with the folder its store is in."""

    name: str
    server: Server
    store: Path
    model: Path

    @property
    def url(self) -> str:
        return self.server.url

    def respawn(self) -> None:
        """A new process on the same store, in place of one that was killed."""
        old = self.server
        self.server = Server.spawn(
            self.model, old.log_path, *old.arguments, environment=old.environment
        )

    @property
    def host_tokens(self) -> int:
        """What its log says was allocated; 0 without a host tier."""
        found = _HOST_POOL.findall(self.server.log)
        return int(found[-1]) if found else 0

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes its processes read from and sent to the storage layer, as the kernel counts them:
        alike for buffered and direct I/O, and without what the page cache served."""
        read = written = 0
        root = psutil.Process(self.server.process.pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                counters = process.io_counters()
                read += counters.read_bytes
                written += counters.write_bytes
        return read, written

    def stored_bytes(self) -> int:
        """KV bytes in its store: the tier's own count, or the sizes of the files."""
        if self.name in POLICIES:
            return int(self.server.tier_state()["tier_held_bytes:nvme"])
        total = 0
        with contextlib.suppress(OSError), os.scandir(self.store) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat().st_size
        return total

    def occupancy(self) -> dict[str, int]:
        """Tokens on the device and in host memory, bytes in the store."""
        metrics = parse_metrics(self.server.request("/metrics"))
        device = metrics.get("sglang:kv_evictable_tokens", 0.0)
        device += metrics.get("sglang:kv_used_tokens", 0.0)
        return {
            "device": int(device),
            "host": int(metrics.get("sglang:hicache_host_used_tokens", 0.0)),
            "storage": self.stored_bytes(),
        }


def restart(fleet: Fleet) -> None:
    """``kill -9`` of every system once all it has is stored, and new processes on the same stores,
    started side by side."""
    for system in fleet.systems.values():
        system.server.flush()  # refused until everything is stored
        system.server.kill()
    for system in fleet.systems.values():
        system.respawn()
    for system in fleet.systems.values():
        system.server.wait_until_it_generates(START_DEADLINE_S)


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text to values by name; of several label sets the last stays."""
    return {name: float(value) for name, value in _METRIC.findall(text)}


@dataclass
class Fleet:
    """The systems of a scenario, side by side; whoever is not asked idles."""

    geometry: Geometry
    systems: dict[str, System] = field(default_factory=dict)

    def __getitem__(self, name: str) -> System:
        return self.systems[name]

    @property
    def processes(self) -> dict[str, int]:
        """The server process of each system."""
        return {name: system.server.process.pid for name, system in self.systems.items()}

    def in_turn(self, names: Sequence[str], number: int) -> list[System]:
        """The named systems; whoever is last now is first next time."""
        ordered = names if number % 2 == 0 else list(reversed(names))
        return [self.systems[name] for name in ordered]

    def check_equal_memory(self) -> dict[str, int]:
        """Host tokens by system. Raises ``UnequalSystemsError`` unless they are as asked."""
        tokens = {name: system.host_tokens for name, system in self.systems.items()}
        for name, found in tokens.items():
            wanted = 0 if name == "stock" else self.geometry.host_tokens
            if found != wanted:
                raise UnequalSystemsError(
                    f"{name} has {found} host tokens where {wanted} were asked for, so it cannot "
                    "be compared."
                )
        return tokens


@contextlib.contextmanager
def start_fleet(
    names: Sequence[str],
    geometry: Geometry,
    *,
    model: Path,
    folder: Path,
    extra: Sequence[str] = (),
    environment: Callable[[str], Mapping[str, str]] = lambda _: {},
) -> Iterator[Fleet]:
    """Launch the systems together and wait for all; they are killed however the block ends.
    ``environment`` is what a system of that name gets beside what all get."""
    fleet = Fleet(geometry)
    try:
        for name in names:
            arguments = launch_arguments(name, geometry, folder, extra)
            variables = {**ENVIRONMENT, **naming_threads(), **environment(name)}
            server = Server.spawn(model, folder / f"{name}.log", *arguments, environment=variables)
            fleet.systems[name] = System(name, server, folder / name, model)
        for system in fleet.systems.values():
            system.server.wait_until_it_generates(START_DEADLINE_S)
        fleet.check_equal_memory()
        yield fleet
    finally:
        for system in fleet.systems.values():
            system.server.kill()
