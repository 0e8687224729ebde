"""The servers of one life: started, asked, killed and started again, and the disks below them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platform_process
import psutil
from object_server import ObjectServer, s3_environment

from prefill_decode import PrefillDecode, Reply, wait_until_healthy
from server_process import Server, free_port

if TYPE_CHECKING:
    from setups import Setup

__all__ = ["DEADLINE_S", "Traffic", "World"]

DEADLINE_S = 180.0
STOP_S = 60.0
SHARING = "abc"
"""Names of servers that share pages with each other."""
HERE = Path(__file__).resolve().parent


class World:
    """What the clients and the operator of a life see of its servers."""

    def __init__(self, model: Path, folder: Path, setup: Setup, seed: int) -> None:
        self.setup, self.folder = setup, folder
        self.report = folder / "platform.jsonl"
        self._model, self._disk = model, folder / "disk.json"
        self._num_started = 0
        self.pair: PrefillDecode | None = None
        self.servers: dict[str, Server] = {}
        environment = platform_process.environment(
            self.report,
            seed=seed,
            MODE=setup.mode,
            HORIZON_S=str(setup.horizon_s),
            DRAIN=str(folder / "drain"),
        )
        paths = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(
            [paths[0], str(HERE / "unruly_disk"), *paths[1:]]
        )
        self.environment = {
            **environment,
            "PYTHONPATH": os.pathsep.join(paths),
            "UNRULY_DISK_FILE": str(self._disk),
            "OMP_WAIT_POLICY": "passive",
            "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        }
        if setup.topology == "ranks":
            self.environment["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"
        self.bucket = str(folder / "bucket")
        self._own: dict[str, tuple[str, ...]] = {"server": ()}  # flags, by role
        self._objects: ObjectServer | None = None
        if setup.topology == "peers":
            self._objects = ObjectServer()
            self.bucket = f"s3://{self._objects.make_bucket()}"
            ports = [str(free_port()) for _ in SHARING]
            peers = ",".join(f"localhost:{port}" for port in ports)
            self._own = {
                role: ("--tier-peers", peers, "--tier-peer-port", port)
                for role, port in zip(SHARING, ports, strict=True)
            }
            # Temporary files of the servers alone, which leave none.
            self.temporary = folder / "temporary"
            self.temporary.mkdir()
            self.environment["TMPDIR"] = str(self.temporary)
            self.environment |= s3_environment(self._objects.url)

    # ---- Lives of servers ----

    def spawn(self) -> None:
        """Does not wait."""
        with self._with_environment():
            if self.setup.topology == "pair":
                self.pair = PrefillDecode.spawn(
                    self._model,
                    self.folder,
                    *self.setup.flags(self.bucket),
                    prefill=("--tier-dir", str(self.folder / "kv-prefill")),
                    decode=("--tier-dir", str(self.folder / "kv-decode")),
                )
                self.servers = {"prefill": self.pair.prefill, "decode": self.pair.decode}
            else:
                self.servers = {role: self._spawn(role) for role in self._own}

    def wait_until_ready(self) -> None:
        for server in self.servers.values():
            wait_until_healthy(server, "/health" if self.pair else "/health_generate")

    def _spawn(self, role: str) -> Server:
        log = self.folder / f"{role}-{self._num_started}.log"
        self._num_started += 1
        flags = ("--tier-dir", str(self.folder / f"kv-{role}"), *self._own[role])
        return Server.spawn(self._model, log, *flags, *self.setup.flags(self.bucket))

    def kill(self, role: str) -> None:
        self.servers[role].kill()

    def stop(self, role: str) -> list[str]:
        """As an operator does it. What the server leaves behind."""
        server = self.servers[role]
        group = processes(server)
        shared = {name for process in group for name in shared_memory(process.pid)}
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(STOP_S)
        left = [str(each) for each in psutil.wait_procs(group, STOP_S)[1] if not has_ended(each)]
        server.kill()
        return left + [name for name in sorted(shared) if os.path.exists(name)]

    def restart(self, role: str) -> None:
        """In the place of one that was killed."""
        with self._with_environment():
            if self.pair is None:
                self.servers[role] = self._spawn(role)
                self.wait_until_ready()
            else:
                self.servers[role] = self.pair.restart(role)

    def close(self) -> None:
        for server in self.servers.values():
            server.kill()
        if self._objects is not None:
            self._objects.close()

    @contextlib.contextmanager
    def _with_environment(self) -> Iterator[None]:
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    # ---- Requests ----

    def generate(
        self,
        role: str,
        prompt: list[int],
        num_new: int,
        *,
        patience_s: float = DEADLINE_S,
        **extra: Any,
    ) -> Reply:
        """Of one server, or the pair. The client of one leaves when its patience is over."""
        if self.pair is not None:
            return self.pair.generate(prompt, num_new, **extra)
        sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, **extra}
        return self.ask(role, "/generate", body, patience_s)

    def ask(self, role: str, path: str, body: Any = None, timeout_s: float = DEADLINE_S) -> Reply:
        """Any other call; a connection that breaks is status 0."""
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

    def states(self) -> dict[str, dict[str, Any]]:
        """Our counters, by server."""
        return {
            role: server.request("/server_info")["internal_states"][0]
            for role, server in self.servers.items()
        }

    def drain(self, order: str) -> None:
        """Idle schedulers empty their trees."""
        new = self.folder / "drain.new"
        new.write_text(order)
        new.replace(self.folder / "drain")

    # ---- Disks ----

    def order_disk(self, **orders: Any) -> None:
        """How the disks behave from now on; nothing is a disk in order."""
        new = self._disk.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.replace(self._disk)

    def region_files(self, role: str) -> list[Path]:
        return sorted((self.folder / f"kv-{role}").rglob("region-*.kv"))

    def stored_files(self, role: str) -> list[Path]:
        """What a disk or a bucket may damage."""
        objects = [path for path in Path(self.bucket).rglob("*") if path.is_file()]
        return self.region_files(role) + sorted(objects)


def processes(server: Server) -> list[psutil.Process]:
    """Of a server that runs."""
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more, though nobody may have waited for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def shared_memory(pid: int) -> set[str]:
    """Names under ``/dev/shm`` of what a process has mapped, but for what SGLang always leaves."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = (line.split(maxsplit=5) for line in lines)
    names = {one[5] for one in found if len(one) == 6 and one[5].startswith("/dev/shm/")}
    return {name for name in names if not name.startswith("/dev/shm/sglang_loads_")}


class Traffic:
    """Lets requests through, or waits until none is under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open, self._active = True, 0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_open, 2 * DEADLINE_S), "never let in"
            self._active += 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self, *, waits: bool) -> Iterator[None]:
        """No request begins, and where it waits none is under way."""
        with self._changed:
            self._is_open = False
            if waits:
                ended = self._changed.wait_for(lambda: not self._active, DEADLINE_S)
                assert ended, f"{self._active} requests do not end"
        try:
            yield
        finally:
            with self._changed:
                self._is_open = True
                self._changed.notify_all()
