"""A server that dies takes the answer with it: through a front, killed as ``kill -9`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from route_front import Front

from conftest import SMALL, Launch, make_prompts
from kit.waiting import eventually
from server_process import Server
from sglang_tiered.client import Generated, TierClient

pytest.importorskip("envoy")
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE, EVERY = 64, 64
LENGTH, NUM_NEW, KILLED_AT = 700, 400, 200
KILLS = range(1, 20)
PROMPTS = make_prompts(4700, 2 + len(KILLS), LENGTH)


class Cluster:
    """One server behind a front, or more of them over one bucket."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        self._launch, self._folder = launch, folder
        self.servers: dict[str, Server] = {}  # by their addresses
        self.add("a")
        self.front = Front.start(folder, map("http://{}".format, self.servers))
        try:
            self.front.wait_until_ready(1)
        except BaseException:
            self.front.close()
            raise

    def add(self, name: str) -> None:
        """One on the tier directory of that name."""
        flags = (*SMALL, "--tier-dir", str(self._folder / name))
        flags += ("--tier-object-url", str(self._folder / "bucket"))
        server = self._launch(*flags, "--tier-checkpoint-tokens", str(EVERY))
        self.servers[f"127.0.0.1:{server.port}"] = server

    def kill_the_busy(self) -> None:
        def running() -> list[str]:
            """What a scheduler tells of its load is a moment old."""
            loads = {a: s.request("/v1/loads?include=core") for a, s in self.servers.items()}
            return [a for a, load in loads.items() if load["loads"][0]["num_running_reqs"]]

        eventually(running, "the request runs")
        (address,) = running()
        self.servers.pop(address).kill()

    def restart(self) -> None:
        self.kill_the_busy()
        self.add("a")
        self.front.follow(map("http://{}".format, self.servers))

    def answer(self, prompt: Sequence[int], breaks: Callable[[], object]) -> list[Generated]:
        """What a client gets where it breaks after ``KILLED_AT`` tokens."""
        sampling = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
        pieces: list[Generated] = []
        num_ids, is_whole = 0, True
        with TierClient(f"http://127.0.0.1:{self.front.port}") as client:
            for piece in client.generate(prompt, sampling):
                pieces.append(piece)
                num_ids += len(piece.ids)
                if num_ids >= KILLED_AT and is_whole:
                    is_whole = False
                    breaks()
        return pieces


@pytest.fixture(scope="module")
def cluster(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(launch, tmp_path_factory.mktemp("cluster"))
    yield made
    made.front.close()
    assert "Traceback" not in made.front.log, made.front.log


def expect_the_answer_of_one_server(
    pieces: list[Generated], stock: Server, prompt: list[int]
) -> Generated:
    ids = [token for piece in pieces for token in piece.ids]
    assert ids == stock.generate(prompt, NUM_NEW).output_ids
    last = pieces[-1]
    assert last.num_resumed == 1 and last.is_exact
    return last


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.long) for n in KILLS)])
def test_restarted_server_goes_on_from_its_disk(
    cluster: Cluster, stock: Server, number: int
) -> None:
    pieces = cluster.answer(PROMPTS[number], cluster.restart)
    last = expect_the_answer_of_one_server(pieces, stock, PROMPTS[number])
    assert last.num_computed_again <= EVERY + PAGE, last


@pytest.mark.long
def test_another_server_goes_on(cluster: Cluster, stock: Server) -> None:
    """It finds in the bucket what was there some seconds ago."""
    cluster.add("b")
    cluster.front.follow(map("http://{}".format, cluster.servers))
    cluster.front.wait_until_ready(2)
    pieces = cluster.answer(PROMPTS[-1], cluster.kill_the_busy)
    expect_the_answer_of_one_server(pieces, stock, PROMPTS[-1])
