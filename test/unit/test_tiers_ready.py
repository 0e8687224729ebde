"""The readiness probe of ``deploy/`` waits for the tiers, and for nothing that may fail later."""

from __future__ import annotations

import importlib.util
import urllib.request
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kit.cost_records import record_of
from kit.serving import Quiet, serving
from server_process import free_port
from sglang_tiered.policy.cost_model import CostModel
from sglang_tiered.policy.server_costs import ServerCosts

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


class Handler(Quiet):
    server: Answers

    def do_GET(self) -> None:
        costs = self.server.costs
        status = costs if isinstance(costs, int) else 200
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            status = 401
        status = {"/ready": self.server.ready, "/health": self.server.health}.get(self.path, status)
        is_told = status == 200 and self.path == "/tier/costs"
        self.answer(status, msgspec.json.encode(costs) if is_told else b"")


@pytest.fixture
def server() -> Iterator[Answers]:
    made = Answers(("127.0.0.1", 0), Handler)
    with serving(made):
        yield made


def costs(*namespaces: str, num_ranks: int = 1, of: Any = None, **more: Any) -> ServerCosts:
    """``of`` each rank: other fields."""
    ranks = tuple(
        msgspec.structs.replace(RECORD, rank=rank, namespace=name, **of or {})
        for rank, name in enumerate(namespaces)
    )
    return ServerCosts(num_ranks=num_ranks, ranks=ranks, **{"draining": False, **more})


ONE = "11" * 32
SICK = {name: msgspec.structs.replace(tier, healthy=False) for name, tier in RECORD.tiers.items()}
OPENING = "the tiers of 1 replicas are opening"


def address(server: Answers) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def look(server: Answers, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = tiers_ready.main([address(server)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("ready", "health", "told", "sentence"),
    [
        (200, 200, costs(ONE), ""),
        (200, 200, 404, ""),  # --tier-mode host
        (200, 200, costs("", of={"attached": False}), ""),
        (200, 200, costs(ONE, of={"tiers": SICK}), ""),
        (
            200,
            200,
            costs(ONE, ONE, num_ranks=4, num_local_ranks=2),
            "",
        ),
        (404, 200, 404, ""),  # SGLang answers no more than /health there
        (404, 404, 404, "/"),  # something else listens there
        (503, 200, costs(ONE), "starting, paused or ending (/ready answers 503)"),
        (200, 200, costs(""), f"{OPENING}: weights are read"),
        (200, 200, costs(ONE, "", num_ranks=2), OPENING),
        (200, 200, costs(ONE, draining=True), "about to end"),
        (200, 200, 503, "no scheduler has told of its tiers yet"),
    ],
)
def test_not_ready_before_the_tiers_are_open(
    server: Answers, capsys: Any, ready: int, health: int, told: Any, sentence: str
) -> None:
    server.ready, server.health, server.costs = ready, health, told
    code, said = look(server, capsys)
    assert (code, bool(said)) == (int(bool(sentence)), bool(sentence))
    assert sentence in said and said.count("\n") == code


def test_a_guarded_server_wants_its_key(
    server: Answers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.costs, server.key = costs("11" * 32), KEY
    code, said = look(server, capsys)
    assert code == 1 and tiers_ready.KEY_VARIABLE in said
    monkeypatch.setenv(tiers_ready.KEY_VARIABLE, KEY)
    assert look(server, capsys) == (0, "")


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
