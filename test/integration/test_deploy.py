"""The compose file's own commands, as processes of this machine: keys and a model are made;
prefill, decode, router, Redis and Prometheus start; a chat request goes through; every instance is
scraped.

No container runs. Of what the file says only this is changed: names of hosts become this machine,
ports become free ones, and paths of containers become folders of this test. The object store's
image is replaced by the S3 server of the other tests, and Grafana's by nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deployed import DEPLOY, ROOT, SECRETS, Service, is_shell, read_dockerfile, read_services
from object_server import CREDENTIALS, ObjectServer
from redis import AuthenticationError, Redis
from redis_server import redis_program
from zygote import Zygotes

from server_process import free_ports

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

START_DEADLINE_S = 300.0
ANSWER_DEADLINE_S = 60.0
SERVERS = ("prefill", "decode")
ONCE = ("keys", "model")
LONG = "A prefix comes back in whole pages of 64 tokens, and this one is longer. " * 4


@dataclass
class Stack:
    """The services of the compose file on this machine."""

    folder: Path
    services: dict[str, Service]
    ports: dict[tuple[str, int], int] = field(default_factory=dict)
    processes: dict[str, Any] = field(default_factory=dict)
    bucket: ObjectServer | None = None

    def __post_init__(self) -> None:
        for service in self.services.values():
            first = free_ports(len(service.ports)) if service.ports else 0  # the router's follow it
            for place, port in enumerate(service.ports):
                self.ports[service.name, port] = first + place
        self.bin.mkdir()

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    def url(self, name: str, port: int) -> str:
        return f"http://127.0.0.1:{self.ports[name, port]}"

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
                    to.write_text(self.here(service, file.read_text(encoding="utf-8")))
            found[mount.target] = place
        if "build" in service.record:
            _, stages = read_dockerfile()
            copied = stages[service.record["build"]["target"]].copied
            found |= {inside: ROOT / outside for outside, inside in copied.items()}
        return found

    def here(self, service: Service, text: str, paths: dict[str, Path] | None = None) -> str:
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
        for inside, place in sorted((paths or {}).items(), reverse=True):
            text = re.sub(rf"(?<![\w.-]){re.escape(inside)}(?![\w.-])", str(place), text)
        return text

    def command(self, service: Service, words: list[str]) -> list[str]:
        """A command of the file for this machine."""
        paths = self.paths(service)
        return [self.here(service, word, paths) for word in words]

    def environment(self, service: Service, **more: str) -> dict[str, str]:
        own = {n: v for n, v in os.environ.items() if not n.startswith(("SGLANG_", "AWS_"))}
        said = {name: self.here(service, value) for name, value in service.environment.items()}
        return own | said | more

    @property
    def path(self) -> str:
        """Where programs that images have are found here."""
        return f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def run(self, name: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command of a service to its end."""
        service = self.services[name]
        return subprocess.run(
            self.command(service, words),
            env=self.environment(service, PATH=self.path),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=START_DEADLINE_S,
        )

    def start(self, name: str, program: str = "") -> None:
        """Start a service's command; ``program`` is the entry point of an image that has one."""
        service = self.services[name]
        words = [*([program] if program else []), *self.command(service, service.command)]
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                words,
                env=self.environment(service, PATH=self.path),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def fork(self, name: str, zygotes: Zygotes) -> None:
        """Start a server's command from a process that has imported SGLang."""
        service = self.services[name]
        program, *words = self.command(service, service.command)
        assert program == "python3"
        # The image's, where it can change what a process does.
        environment = self.environment(service, OMP_WAIT_POLICY="passive")
        self.processes[name] = zygotes.fork(words, environment, self.log(name))

    def until(self, name: str, check: Callable[[], Any], deadline_s: float) -> Any:
        """Until something is so, while that service runs."""
        deadline = time.monotonic() + deadline_s
        while not (found := check()):
            told = self.log(name).read_text(errors="replace")[-4000:]
            assert self.processes[name].poll() is None, f"{name} ended:\n{told}"
            assert time.monotonic() < deadline, f"{name}: not so after {deadline_s} s:\n{told}"
            time.sleep(0.5)  # what looks takes processor time too
        return found

    def is_healthy(self, name: str) -> bool:
        """As the file's own health check of the service says."""
        return self.run(name, self.services[name].health).returncode == 0

    def kill(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


def prometheus_program() -> str | None:
    """As ``scripts/prometheus`` finds it, where there is that script; else the PATH's."""
    script = ROOT / "scripts" / "prometheus"
    if not script.exists():
        return shutil.which("prometheus")
    found = subprocess.run([script], capture_output=True, text=True, check=False, timeout=290)
    return found.stdout.strip() if found.returncode == 0 else None


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, zygotes: Zygotes) -> Iterator[Stack]:
    """All of it, up and healthy."""
    secrets = SECRETS | {
        "BUCKET_KEY_ID": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "BUCKET_SECRET": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    stack = Stack(tmp_path_factory.mktemp("stack"), read_services(secrets))
    with contextlib.ExitStack() as held:
        held.callback(stack.kill)
        bucket = stack.bucket = held.enter_context(ObjectServer())
        stack.ports["bucket", 8333] = bucket.address[1]
        # Its image makes it.
        bucket.client.create_bucket(Bucket=stack.services["bucket"].environment["S3_BUCKET"])
        (stack.bin / "redis-server").symlink_to(redis_program())
        stack.start("redis")
        with ThreadPoolExecutor(len(ONCE)) as pool:
            ended = pool.map(lambda name: stack.run(name, stack.services[name].command), ONCE)
            for name, done in zip(ONCE, ended, strict=True):
                assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        for name in SERVERS:
            stack.fork(name, zygotes)
        stack.start("router")  # it waits for them
        if program := prometheus_program():
            stack.start("prometheus", program)
        for name in (*SERVERS, "router"):
            stack.until(name, lambda n=name: stack.is_healthy(n), START_DEADLINE_S)  # type: ignore[misc]
        yield stack


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_DEADLINE_S) as response:
        text = response.read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


def test_a_chat_request_is_answered_through_the_router(stack: Stack) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": LONG}],
        "max_tokens": 16,
        "ignore_eos": True,
    }
    answer = ask(stack.url("router", 30000) + "/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["message"]["content"]


def test_servers_share_the_redis_and_the_bucket(stack: Stack) -> None:
    for name in SERVERS:
        (record,) = ask(stack.url(name, 30000) + "/tier/costs")["ranks"]
        assert (record["role"], record["keyed"]) == (name, True)
        assert all(record["tiers"][tier]["healthy"] for tier in ("nvme", "peer", "object")), record
    place = {"host": "127.0.0.1", "port": stack.ports["redis", 6379]}
    with Redis(**place, password=SECRETS["REDIS_PASSWORD"]) as client:
        assert len(list(client.scan_iter("sgt2:*:server:*"))) == len(SERVERS)
    with Redis(**place) as stranger, pytest.raises(AuthenticationError):
        stranger.ping()
    assert stack.bucket is not None
    name, client = stack.services["bucket"].environment["S3_BUCKET"], stack.bucket.client
    stack.until(
        "prefill",
        lambda: client.list_objects_v2(Bucket=name, Prefix="pages/").get("KeyCount"),
        ANSWER_DEADLINE_S,
    )


def test_prometheus_scrapes_every_instance(stack: Stack) -> None:
    if "prometheus" not in stack.processes:
        pytest.skip("no prometheus here (Debian: apt-get install prometheus)")

    def query(text: str) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            answer = ask(f"{stack.url('prometheus', 9090)}/api/v1/query?query={text}")
            return list(answer["data"]["result"])
        return []

    wanted = {("sglang-tiered", "prefill"), ("sglang-tiered", "decode"), ("router", "")}

    def scraped() -> bool:
        up = {
            (one["metric"]["job"], one["metric"].get("role", ""))
            for one in query("up")
            if one["value"][1] == "1"
        }
        return wanted <= up

    stack.until("prometheus", scraped, ANSWER_DEADLINE_S)
    found = query('count+by+(role)+({__name__=~"sglang_tiered.%2B",job="sglang-tiered"})')
    assert {one["metric"]["role"] for one in found} == set(SERVERS)
    rules = ask(f"{stack.url('prometheus', 9090)}/api/v1/rules")["data"]["groups"]
    assert bool(rules) == bool(list((ROOT / "scripts" / "grafana").glob("alerts*.yaml")))


def test_sigterm_ends_a_server_within_its_grace(stack: Stack) -> None:
    """Not ready from then on, and nothing left to be killed."""
    service, process = stack.services["prefill"], stack.processes["prefill"]
    minutes = re.fullmatch(r"(\d+)m", service.record["stop_grace_period"])
    assert minutes
    process.terminate()
    looked = stack.run("prefill", service.health)
    assert looked.returncode == 1 and looked.stdout.startswith("tiers_ready: "), looked.stdout
    assert process.wait(timeout=60.0 * int(minutes[1])) == 0


def test_every_shell_of_the_file_is_run_here(stack: Stack) -> None:
    """One that is added is one more that nobody has seen running."""
    run = {*ONCE, "redis"}
    assert {s.name for s in stack.services.values() if is_shell(s.command)} <= run
    assert (DEPLOY / "compose.yaml").is_file()
