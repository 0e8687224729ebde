"""What the README and `docs/` say to type does what they say, as it stands there."""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from documented_commands import FRONT_PAGES, RUN_ELSEWHERE, SERVERS, Command, page_blocks
from typed_command import Desk, interrupt, num_tokens, wait_for

from server_process import free_port

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

DOCUMENTED_PORT = 30000


def commands_by_server() -> dict[str, list[Command]]:
    """Every distinct command line that starts a server, and what the pages say to type once it is
    up: what comes after it on its page. Before the first one on a page that is `scripts/serve`."""
    found: dict[str, list[Command]] = {}
    for path in FRONT_PAGES:
        server = "scripts/serve"
        for block in page_blocks(path):
            if block.not_run is not None:
                continue
            for command in block.commands:
                if command.begins_with(*RUN_ELSEWHERE):
                    continue
                if command.is_server:
                    server = " ".join(command.words)
                found.setdefault(server, []).append(command)
    return found


GROUPS = commands_by_server()


@pytest.fixture
def port() -> int:
    """Return the documented port, or a free one that replaces it in every command if it or one of
    the next five, which `scripts/serve-pd` uses, is taken."""
    with contextlib.ExitStack() as held, contextlib.suppress(OSError):
        for place in range(6):
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", DOCUMENTED_PORT + place))
        return DOCUMENTED_PORT
    return free_port()


@pytest.fixture(scope="module")
def desk(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk.lay_out(tmp_path_factory.mktemp("desk"), model)


def at(port: int, line: str) -> str:
    """The same command line at another port: the one change that is ever made."""
    if port == DOCUMENTED_PORT:
        return line
    for server in sorted(SERVERS, key=len, reverse=True):
        if line.startswith(server):
            return line.replace(server, f"{server} --port {port}", 1)
    return line.replace(f":{DOCUMENTED_PORT}", f":{port}")


@pytest.mark.parametrize("server_line", GROUPS)
def test_documented_commands_run_and_ctrl_c_leaves_nothing(
    server_line: str, desk: Desk, port: int, tmp_path: Path
) -> None:
    with desk.start(at(port, server_line), port, tmp_path / "log") as server:
        assert desk.try_what_is_printed(server)
        for command in GROUPS[server_line]:
            if not command.is_server:
                desk.run(at(port, command.text))
        if server_line == "scripts/serve":  # how they reach NVMe is the demo's test
            assert num_tokens(server.log, "device") == 8192
            assert num_tokens(server.log, "host") >= 2 * 8192
        interrupt(server)


PAIR = pytest.param("scripts/serve-pd", marks=pytest.mark.long)


@pytest.mark.parametrize("command", ["scripts/serve", PAIR])
def test_ctrl_c_during_a_model_load_leaves_nothing(
    command: str, desk: Desk, port: int, tmp_path: Path
) -> None:
    with desk.start(f"{command} --port {port}", port, tmp_path / "log") as server:
        wait_for(re.compile("server_args="), server)  # it starts the other processes then
        interrupt(server)


CONFIG = """\
model-path: M
dtype: float32
max-total-tokens: 4096
tier-host-bytes: 64MiB
tier-nvme-bytes: 1GiB
tier-dir: kv-of-the-file
"""


OF_THE_FILE = "scripts/serve --config tiers.yaml --host ::"
OVER_TLS = "scripts/serve-pd --host ::1 --ssl-certfile cert.pem --ssl-keyfile key.pem"


@pytest.mark.parametrize(
    "command", [OF_THE_FILE, pytest.param(OVER_TLS, marks=pytest.mark.long)], ids=["one", "pair"]
)
def test_what_is_printed_works_by_any_address(
    command: str, desk: Desk, port: int, tmp_path: Path
) -> None:
    """By IPv6, over TLS, and where a proxy is set that knows nothing of this machine. One takes
    what it serves from a configuration file."""
    desk.run("openssl req -x509 -newkey rsa -nodes -keyout key.pem -out cert.pem -subj /CN=here")
    (desk.folder / "tiers.yaml").write_text(CONFIG)
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy"), "http://127.0.0.1:9")
    behind = replace(desk, environment={**desk.environment, **proxies})
    with behind.start(f"{command} --port {port}", port, tmp_path / "log") as server:
        wait_for(re.compile(r"\[::1\]"), server)
        assert desk.try_what_is_printed(server)
        if command == OF_THE_FILE:
            assert "device  4,096 tokens" in server.log
            assert re.search(r"^  nvme +[\d,]+ tokens in 1GiB at ", server.log, re.MULTILINE)
            assert (desk.folder / "kv-of-the-file" / "STORE").exists()
        served = len(server.log)
        interrupt(server)
        assert not re.search("Traceback|leaked|crashed", server.log[served:]), server.log[served:]


HOST_TIER = "sglang serve --radix-cache-backend tiered --enable-hierarchical-cache"
PLAIN = pytest.param("python -m sglang.launch_server", marks=pytest.mark.long)


@pytest.mark.parametrize("command", [HOST_TIER, PLAIN], ids=["serve", "launch_server"])
def test_sglangs_own_commands_serve_with_the_plugin(
    command: str, desk: Desk, port: int, tmp_path: Path
) -> None:
    """On the CPU platform, which SGLang by itself has not; with a host tier that SGLang sizes."""
    line = f"{command} --model-path M --max-total-tokens 4096 --dtype float32 --port {port}"
    with desk.start(line, port, tmp_path / "log") as server:
        server.wait_until_it_generates()
        prompts = [[first] * 1500 for first in (65, 66, 67, 68)]  # more than the device holds
        first_time = [server.generate(prompt) for prompt in prompts]
        again = [server.generate(prompt) for prompt in prompts]
        assert [a.output_ids for a in again] == [a.output_ids for a in first_time]
        from_host = sum(answer.cached["host"] for answer in again)
        assert (from_host > 0) == (command == HOST_TIER)
        interrupt(server)
