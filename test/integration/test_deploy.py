"""The compose file's own commands, as processes of this machine: keys and a model are made;
prefill, decode, router and Redis start; a chat request goes through; every instance is scraped.

No container runs. Of what the file says only this is changed: names of hosts become this machine,
ports become free ones, and paths of containers become folders of this test. The object store's
image is replaced by the S3 server of the other tests, Prometheus and Grafana by nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from deployed import DEPLOY, ROOT, SECRETS, Service, read_dockerfile, read_services
from object_server import CREDENTIALS, ObjectServer
from redis import AuthenticationError, Redis
from redis_server import redis_program
from zygote import Zygotes

from conftest import ask
from server_process import free_ports

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

START_DEADLINE_S = 300.0
SERVERS = ("prefill", "decode")
ONCE = ("keys", "model")
LONG = "A prefix comes back in whole pages of 64 tokens, and this one is longer. " * 4


@dataclass
class Stack:
    """The services of the compose file on this machine."""

    folder: Path
    services: dict[str, Service]
    bucket: ObjectServer
    ports: dict[tuple[str, int], int] = field(default_factory=dict)
    processes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for service in self.services.values():
            first = free_ports(len(service.ports)) if service.ports else 0  # the router's follow it
            for place, port in enumerate(service.ports):
                self.ports[service.name, port] = first + place
        self.ports["bucket", 8333] = self.bucket.address[1]
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        (self.bin / "redis-server").symlink_to(redis_program())

    def at(self, name: str, port: int) -> Any:
        """What ``ask`` asks."""
        return SimpleNamespace(url=f"http://127.0.0.1:{self.ports[name, port]}")

    def paths(self, service: Service) -> dict[str, Path]:
        """What lies where in this service's container: volumes, mounts, files of its image."""
        root, found = self.folder / "roots" / service.name, {}
        for mount in service.mounts:
            place = root / mount.target.lstrip("/")
            if mount.path is None:
                place = self.folder / "volumes" / mount.source
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            else:
                is_folder = mount.path.is_dir()
                for file in mount.path.iterdir() if is_folder else [mount.path]:
                    to = place / file.name if is_folder else place
                    to.parent.mkdir(parents=True, exist_ok=True)
                    to.write_text(self.here(service, file.read_text(encoding="utf-8"), {}))
            found[mount.target] = place
        if "build" in service.record:
            _, stages = read_dockerfile()
            copied = stages[service.record["build"]["target"]].copied
            found |= {inside: ROOT / outside for outside, inside in copied.items()}
        return found

    def here(self, service: Service, text: str, paths: dict[str, Path]) -> str:
        """One text of a service, with the hosts, ports and paths of this machine."""

        def address(match: re.Match[str]) -> str:
            host, port = match["host"], int(match["port"])
            name = service.name if re.match(r"[\d.]+$", host) else host
            shown = host if host == "0.0.0.0" else "127.0.0.1"
            return f"{shown}:{self.ports[name, port]}"

        hosts = "|".join([*map(re.escape, self.services), r"127\.0\.0\.1", r"0\.0\.0\.0"])
        text = re.sub(rf"(?<![\w.-])(?P<host>{hosts}):(?P<port>\d+)\b", address, text)
        for port in service.ports:
            text = re.sub(
                rf"(?<![\w.:]){port}(?![\w.:])", str(self.ports[service.name, port]), text
            )
        for inside, place in sorted(paths.items(), reverse=True):
            text = re.sub(rf"(?<![\w.-]){re.escape(inside)}(?![\w.-])", str(place), text)
        return text

    def command(self, service: Service, words: list[str]) -> list[str]:
        paths = self.paths(service)
        return [self.here(service, word, paths) for word in words]

    def environment(self, service: Service) -> dict[str, str]:
        """With programs that images have."""
        own = {n: v for n, v in os.environ.items() if not n.startswith(("SGLANG_", "AWS_"))}
        said = {name: self.here(service, value, {}) for name, value in service.environment.items()}
        path = f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return own | said | {"PATH": path, "OMP_WAIT_POLICY": "passive"}

    def how(self, name: str) -> dict[str, Any]:
        """How processes of a service are started."""
        environment = self.environment(self.services[name])
        return {"env": environment, "cwd": self.folder, "stdin": subprocess.DEVNULL}

    def run(self, name: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command of a service to its end."""
        return subprocess.run(
            self.command(self.services[name], words),
            **self.how(name),
            capture_output=True,
            text=True,
            check=False,
            timeout=START_DEADLINE_S,
        )

    def start(self, name: str, zygotes: Zygotes) -> None:
        """Start a service's command, a server's from a process that has imported SGLang."""
        words, log = self.command(self.services[name], self.services[name].command), self.log(name)
        if name in SERVERS:
            assert words[0] == "python3"
            self.processes[name] = zygotes.fork(words[1:], self.how(name)["env"], log)
            return
        with log.open("wb") as out:
            self.processes[name] = subprocess.Popen(
                words, **self.how(name), stdout=out, stderr=out, start_new_session=True
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def until(self, name: str, check: Callable[[], Any]) -> None:
        """Until something is so, while that service runs."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not check():
            told = self.log(name).read_text(errors="replace")[-4000:]
            assert self.processes[name].poll() is None, f"{name} ended:\n{told}"
            assert time.monotonic() < deadline, f"{name}: not so in time:\n{told}"
            time.sleep(0.5)  # what looks takes processor time too

    def is_healthy(self, name: str) -> bool:
        """As the file's own health check of the service says."""
        return self.run(name, self.services[name].health).returncode == 0

    def kill(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, zygotes: Zygotes) -> Iterator[Stack]:
    """All of it, up and healthy."""
    secrets = SECRETS | {
        "BUCKET_KEY_ID": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "BUCKET_SECRET": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    with contextlib.ExitStack() as held:
        bucket = held.enter_context(ObjectServer())
        stack = Stack(tmp_path_factory.mktemp("stack"), read_services(secrets), bucket)
        held.callback(stack.kill)
        # Its image makes it.
        bucket.client.create_bucket(Bucket=stack.services["bucket"].environment["S3_BUCKET"])
        for name in ONCE:
            done = stack.run(name, stack.services[name].command)
            assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        for name in ("redis", *SERVERS, "router"):  # which waits for them
            stack.start(name, zygotes)
        for name in (*SERVERS, "router"):
            stack.until(name, lambda n=name: stack.is_healthy(n))
        yield stack


def test_a_chat_request_is_answered_through_the_router(stack: Stack) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": LONG}]}
    body |= {"max_tokens": 16, "ignore_eos": True}
    code, answer = ask(stack.at("router", 30000), "/v1/chat/completions", body)
    assert (code, answer["usage"]["completion_tokens"]) == (200, 16)
    assert answer["choices"][0]["message"]["content"]


def test_servers_share_the_redis_and_the_bucket(stack: Stack) -> None:
    for name in SERVERS:
        (record,) = ask(stack.at(name, 30000), "/tier/costs")[1]["ranks"]
        assert (record["role"], record["keyed"]) == (name, True)
        assert all(record["tiers"][tier]["healthy"] for tier in ("nvme", "peer", "object")), record
    place = {"host": "127.0.0.1", "port": stack.ports["redis", 6379]}
    with Redis(**place, password=SECRETS["REDIS_PASSWORD"]) as client:
        assert len(list(client.scan_iter("sgt2:*:server:*"))) == len(SERVERS)
    with Redis(**place) as stranger, pytest.raises(AuthenticationError):
        stranger.ping()
    name, client = stack.services["bucket"].environment["S3_BUCKET"], stack.bucket.client
    pages = {"Bucket": name, "Prefix": "pages/"}
    stack.until("prefill", lambda: client.list_objects_v2(**pages).get("KeyCount"))


def test_every_target_of_prometheus_tells_ours(stack: Stack) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    statics = [static for job in config["scrape_configs"] for static in job["static_configs"]]
    targets = {tuple(target.split(":")) for static in statics for target in static["targets"]}
    assert {host for host, _ in targets} >= {*SERVERS, "router"}
    for host, port in targets - {("127.0.0.1", "9090")}:
        with urllib.request.urlopen(
            stack.at(host, int(port)).url + "/metrics", timeout=60
        ) as response:
            assert "\nsglang_tiered_" in response.read().decode(), host


def test_sigterm_ends_a_server_within_its_grace(stack: Stack) -> None:
    """Not ready from then on, and nothing left to be killed."""
    service, process = stack.services["prefill"], stack.processes["prefill"]
    minutes = re.fullmatch(r"(\d+)m", service.record["stop_grace_period"])
    assert minutes
    process.terminate()
    looked = stack.run("prefill", service.health)
    assert looked.returncode == 1 and looked.stdout.startswith("tiers_ready: "), looked.stdout
    assert process.wait(timeout=60.0 * int(minutes[1])) == 0
