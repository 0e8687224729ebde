"""The readiness probe of ``deploy/`` waits for the tiers, and for nothing that may fail later."""

from __future__ import annotations

import importlib.util
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kit.cost_records import record_of
from server_process import free_port
from sglang_tiered.policy.cost_model import CostModel
from sglang_tiered.policy.server_costs import ServerCosts

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH = Path(__file__).parents[2] / "deploy" / "tiers_ready.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("tiers_ready", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiers_ready = load()

KEY = "not-a-secret"
RECORD = record_of(CostModel(page_tokens=64, bytes_per_token=1024))


class Answers(ThreadingHTTPServer):
    """What a server says to the two questions."""

    ready: int = 200
    health: int = 200
    costs: ServerCosts | int = 404
    key: str = ""


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_GET(self) -> None:
        costs = self.server.costs
        status = costs if isinstance(costs, int) else 200
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            status = 401
        if self.path == "/ready":
            status = self.server.ready
        elif self.path == "/health":
            status = self.server.health
        self.send_response(status)
        self.end_headers()
        if status == 200 and self.path == "/tier/costs":
            self.wfile.write(msgspec.json.encode(costs))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Answers]:
    with Answers(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def costs(*namespaces: str, num_ranks: int = 1, draining: bool = False) -> ServerCosts:
    ranks = tuple(
        msgspec.structs.replace(RECORD, rank=rank, namespace=name)
        for rank, name in enumerate(namespaces)
    )
    return ServerCosts(draining=draining, num_ranks=num_ranks, ranks=ranks)


def address(server: Answers) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def look(server: Answers, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = tiers_ready.main([address(server)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("ready", "told", "sentence"),
    [
        (200, costs("11" * 32), ""),
        (200, 404, ""),  # --tier-mode host
        (503, costs("11" * 32), "starting, paused or ending (/ready answers 503)"),
        (200, costs(""), "the tiers of 1 replicas are opening: weights are read"),
        (200, costs("11" * 32, num_ranks=2), "the tiers of 1 replicas are opening"),
        (200, costs("11" * 32, "", num_ranks=2), "the tiers of 1 replicas are opening"),
        (200, costs("11" * 32, draining=True), "about to end"),
        (200, 503, "no scheduler has told of its tiers yet"),
    ],
)
def test_not_ready_before_the_tiers_are_open(
    server: Answers,
    capsys: pytest.CaptureFixture[str],
    ready: int,
    told: ServerCosts | int,
    sentence: str,
) -> None:
    server.ready, server.costs = ready, told
    code, said = look(server, capsys)
    assert (code, bool(said)) == (int(bool(sentence)), bool(sentence))
    assert sentence in said and said.count("\n") == code


def test_detached_tiers_leave_the_server_ready(
    server: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    (record,) = costs("").ranks
    record = msgspec.structs.replace(record, attached=False)
    server.costs = ServerCosts(draining=False, num_ranks=1, ranks=(record,))
    assert look(server, capsys) == (0, "")


def test_replicas_of_other_machines_are_not_missed(
    server: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    here = costs("11" * 32, "11" * 32, num_ranks=4)
    server.costs = msgspec.structs.replace(here, num_local_ranks=2)
    assert look(server, capsys) == (0, "")
    server.costs = msgspec.structs.replace(here, num_local_ranks=3)
    assert look(server, capsys)[0] == 1, "one of this machine has not told yet"


def test_machine_without_the_endpoint_is_ready(
    server: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang answers no more than ``/health`` there."""
    server.ready, server.health = 404, 200
    assert look(server, capsys) == (0, "")
    server.health = 404
    assert look(server, capsys)[0] == 1, "something else listens there"


def test_a_sick_tier_leaves_the_server_ready(
    server: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    sick = {
        name: msgspec.structs.replace(tier, healthy=False) for name, tier in RECORD.tiers.items()
    }
    (record,) = costs("11" * 32).ranks
    server.costs = ServerCosts(
        draining=False, num_ranks=1, ranks=(msgspec.structs.replace(record, tiers=sick),)
    )
    assert look(server, capsys) == (0, "")


def test_a_guarded_server_wants_its_key(
    server: Answers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.costs, server.key = costs("11" * 32), KEY
    code, said = look(server, capsys)
    assert code == 1 and tiers_ready.KEY_VARIABLE in said
    monkeypatch.setenv(tiers_ready.KEY_VARIABLE, KEY)
    assert look(server, capsys) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([f"http://127.0.0.1:{free_port()}"], 1, "nothing answers yet"),
        (["localhost:30000"], 2, "localhost:30000 is no address; pass http://HOST:PORT."),
    ],
)
def test_an_address_that_does_not_answer_is_told(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiers_ready.main(arguments) == code
    assert sentence in capsys.readouterr().out


def test_proxy_of_the_environment_is_not_asked(
    server: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers have one for the model hub; it would see the key, and know no server."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # what an earlier test made
    assert load().main([address(server)]) == 0
