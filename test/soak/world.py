"""The servers of one life: drawn, started, asked, killed and started again, and their disks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platform_process
import pytest
from object_server import ObjectServer, s3_environment
from zygote import SLOW_DISK

from conftest import Disk
from prefill_decode import PrefillDecode, Reply, wait_until_healthy
from server_process import Server, free_port

DEADLINE_S = 180.0
TOPOLOGIES = ("one", "ranks", "pair", "peers")
"""One server, one of two ranks, a prefill and a decode server, three servers that share pages with
each other and a bucket over HTTP."""
SHARING = "abc"
SMALL_REGIONS = ("--config", str(Path(__file__).parents[1] / "kit" / "small_regions.yaml"))
TOKEN_BYTES = 3 * 2 * 2 * 64 * 4  # of the demo model, over all ranks
MiB = 1 << 20


@dataclass(frozen=True)
class Setup:
    """How the servers of one life are started."""

    topology: str
    page: int
    device_tokens: int
    host_bytes: int
    nvme_bytes: int
    load: str
    has_bucket: bool
    mode: str  # of the asynchronous platform
    horizon_s: float  # the longest delay of its copies and forwards

    @classmethod
    def draw(cls, source: random.Random, topology: str) -> Setup:
        page = source.choice([16, 64, 64, 256])
        device_tokens = 8192 if page > 64 or topology == "pair" else 4096
        below_device = int(0.6 * device_tokens * TOKEN_BYTES)
        return cls(
            topology,
            page,
            device_tokens,
            source.choice([36 * MiB, 36 * MiB, below_device]),
            source.choice([64, 1024]) * MiB,
            source.choice(["always", "always", "measured"]),
            source.random() < 0.3 or topology == "peers",
            source.choice(["random", "random", "late", "late-forward"]),
            source.choice([0.01, 0.03, 0.15]),
        )

    def flags(self, bucket: str) -> list[str]:
        """Of every server of the life, but for the directory of its tier and its peers."""
        flags = [
            *("--page-size", str(self.page), "--max-total-tokens", str(self.device_tokens)),
            *("--chunked-prefill-size", "512", "--enable-metrics", *SMALL_REGIONS),
            *("--tier-host-bytes", str(self.host_bytes), "--tier-load", self.load),
            *("--tier-nvme-bytes", str(self.nvme_bytes)),
        ]
        flags += ["--tier-object-url", bucket] if self.has_bucket else []
        return [*flags, "--tp", "2"] if self.topology == "ranks" else flags


class World:
    """What the clients and the operator of a life see of its servers."""

    def __init__(self, model: Path, folder: Path, setup: Setup, seed: int) -> None:
        self.setup, self.folder = setup, folder
        self.report, self.disk = folder / "platform.jsonl", Disk(folder / "disk.json")
        self._model, self._num_started = model, 0
        self.pair: PrefillDecode | None = None
        self.servers: dict[str, Server] = {}
        settings = {"MODE": setup.mode, "HORIZON_S": f"{setup.horizon_s}"}
        found = platform_process.environment(
            self.report, seed=seed, DRAIN=str(folder / "drain"), **settings
        )
        self._environment = {
            **found,
            "PYTHONPATH": f"{found['PYTHONPATH']}{os.pathsep}{SLOW_DISK}",
            "SLOW_DISK_FILE": str(self.disk.file),
            "OMP_WAIT_POLICY": "passive",
            "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        }
        if setup.topology == "ranks":
            self._environment["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"
        self.bucket = str(folder / "bucket")
        self._own: dict[str, tuple[str, ...]] = {"server": ()}  # flags, by role
        self._objects: ObjectServer | None = None
        if setup.topology == "peers":
            self._objects = ObjectServer()
            self.bucket = f"s3://{self._objects.make_bucket()}"
            self._environment |= s3_environment(self._objects.url)
            ports = {role: str(free_port()) for role in SHARING}
            peers = ("--tier-peers", ",".join(f"localhost:{port}" for port in ports.values()))
            self._own = {r: (*peers, "--tier-peer-port", port) for r, port in ports.items()}

    # ---- Lives of servers ----

    def spawn(self) -> None:
        """Does not wait."""
        if self.setup.topology != "pair":
            self.servers = {role: self._spawn(role) for role in self._own}
            return
        flags = self.setup.flags(self.bucket)
        own = {r: ("--tier-dir", str(self.folder / f"kv-{r}")) for r in ("prefill", "decode")}
        with self._with_environment():
            self.pair = PrefillDecode.spawn(self._model, self.folder, *flags, **own)
        self.servers = {"prefill": self.pair.prefill, "decode": self.pair.decode}

    def wait_until_ready(self) -> None:
        for server in self.servers.values():
            wait_until_healthy(server, "/health" if self.pair else "/health_generate")

    def _spawn(self, role: str) -> Server:
        log = self.folder / f"{role}-{self._num_started}.log"
        self._num_started += 1
        flags = ("--tier-dir", str(self.folder / f"kv-{role}"), *self._own[role])
        with self._with_environment():
            return Server.spawn(self._model, log, *flags, *self.setup.flags(self.bucket))

    def restart(self, role: str) -> None:
        """In the place of one that was killed or stopped."""
        if self.pair is None:
            self.servers[role] = self._spawn(role)
            self.wait_until_ready()
            return
        with self._with_environment():
            self.servers[role] = self.pair.restart(role)

    def close(self) -> None:
        for server in self.servers.values():
            server.kill()
        if self._objects is not None:
            self._objects.close()

    @contextlib.contextmanager
    def _with_environment(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._environment.items():
                patch.setenv(name, value)
            yield

    # ---- Requests ----

    def ask(self, role: str, path: str, body: Any = None, timeout_s: float = DEADLINE_S) -> Reply:
        """Any call; a connection that breaks is status 0."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.servers[role].url + path, data, {"Content-Type": "application/json"}
        )
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                status, text = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        except OSError as error:
            status, text = 0, repr(error).encode()
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text.decode(errors="replace")
        if not isinstance(answer, dict) and path == "/generate":
            answer = {"message": answer}
        return Reply(status, answer, time.monotonic() - began)

    def drain(self, order: str) -> None:
        """Idle schedulers empty their trees."""
        new = self.folder / "drain.new"
        new.write_text(order)
        new.replace(self.folder / "drain")

    def stored_files(self, role: str) -> list[Path]:
        """What a disk or a bucket may damage."""
        objects = [path for path in Path(self.bucket).rglob("*") if path.is_file()]
        regions = (self.folder / f"kv-{role}").rglob("region-*.kv")
        return sorted(regions) + sorted(objects)
