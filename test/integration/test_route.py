"""Three real servers behind a front, two of them by ``scripts/serve-cluster``: the same answers as
one, hits where the picker says, and a death that clients do not see."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis_server import RedisServer
from route_front import Answer, Front
from typed_command import Desk, interrupt

from conftest import SMALL, aligned, make_prompts
from kit.waiting import eventually
from prefill_decode import ENVIRONMENT
from server_process import Server, free_ports

pytest.importorskip("envoy")
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_SERVERS = 3
LENGTH, NUM_NEW = 1800, 8
PROMPTS = make_prompts(4600, 6, LENGTH)
SERVED = "x-gateway-destination-endpoint-served"
LEARN_S = 60.0
NOWHERE = 'sglang_tiered_route_prompt_tokens_total{tier="none"}'


class Cluster:
    """Two servers and the front as ``scripts/serve-cluster`` starts them, and what joins later.
    ``servers``: the launchers' processes by their addresses."""

    def __init__(self, model: Path, folder: Path, redis: RedisServer) -> None:
        self._model, self._folder, self._redis = model, folder, redis
        self._joined: list[Server] = []
        port, log = free_ports(3), folder / "log"
        desk = Desk.lay_out(folder, model)
        flags = f"--count {NUM_SERVERS - 1} --list servers.txt --tier-dir kv --dtype float32"
        flags += f" --tier-index {redis.url}"
        line = f"scripts/serve-cluster --model-path M --port {port} {flags} {shlex.join(SMALL)}"
        self.script = desk.start(line, port, log)
        try:
            self.printed = desk.try_what_is_printed(self.script)
        except BaseException:
            self.script.kill()
            raise
        process = self.script.process
        self.front = Front(port, desk.folder / "servers.txt", log, process)
        self.servers: dict[str, psutil.Process] = {}
        for started in psutil.Process(process.pid).children():
            words = started.cmdline()
            if "sglang_tiered.launch_server" in words:
                self.servers[f"127.0.0.1:{words[words.index('--port') + 1]}"] = started

    def join(self) -> None:
        """One server more, in the file too."""
        port, name = free_ports(2), f"joined-{len(self._joined)}"
        events = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "bind": True}
        events |= {"replay_endpoint": f"tcp://127.0.0.1:{port + 1}", "format": "dynamo"}
        server = Server.spawn(
            self._model,
            self._folder / f"{name}.log",
            *(*SMALL, "--tier-dir", str(self._folder / name), "--tier-index", self._redis.url),
            *("--kv-events-config", json.dumps(events)),
            environment=ENVIRONMENT,
        )
        self._joined.append(server)
        self.servers[f"127.0.0.1:{server.port}"] = psutil.Process(server.process.pid)
        server.wait_until_it_generates()
        self.front.follow(f"http://{address}" for address in self.servers)
        self.front.wait_until_ready(NUM_SERVERS)

    def schedulers(self) -> list[psutil.Process]:
        children = [one for server in self.servers.values() for one in server.children(True)]
        return [one for one in children if "scheduler" in " ".join(one.cmdline())]

    def kill(self, address: str) -> None:
        server = self.servers.pop(address)
        for process in [*server.children(recursive=True), server]:
            process.kill()

    def close(self) -> None:
        """By Ctrl-C, which leaves nothing."""
        try:
            interrupt(self.script)
        finally:
            self.script.kill()
            for server in self._joined:
                server.kill()
        assert "Traceback" not in self.script.log, self.script.log


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with RedisServer() as redis:
        made = Cluster(model, tmp_path_factory.mktemp("cluster"), redis)
        try:
            made.join()
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def front(cluster: Cluster) -> Front:
    return cluster.front


def generate(front: Front, prompt: list[int]) -> Answer:
    answer = front.generate(prompt, NUM_NEW)
    assert answer.status == 200, answer
    return answer


def ids_of(answer: Answer) -> list[int]:
    return list(json.loads(answer.body)["output_ids"])


def num_cached(answer: Answer) -> int:
    return int(json.loads(answer.body)["meta_info"]["cached_tokens"])


def ask_all(front: Front) -> list[Answer]:
    """Each prompt once. Returns when the picker was told of all pages that came of it."""

    def known() -> int:
        return sum(row["replicas"][0]["pages"] for row in front.servers())

    pages = known()
    answers = [generate(front, prompt) for prompt in PROMPTS]
    num_told = [aligned(LENGTH + NUM_NEW) // 64 - num_cached(answer) // 64 for answer in answers]
    eventually(lambda: known() >= pages + sum(num_told), "events", timeout_s=LEARN_S)
    return answers


@pytest.fixture(scope="module")
def asked(front: Front) -> list[Answer]:
    """Each prompt once, and once more when the picker knows who has it."""
    return ask_all(front) + ask_all(front)


def test_answers_are_those_of_one_server(
    cluster: Cluster, asked: list[Answer], stock: Server
) -> None:
    answered, _, told = cluster.printed.partition('{"servers"')
    assert json.loads(answered)["text"]
    assert told.count('"ready": true') == NUM_SERVERS - 1
    expected = [answer.output_ids for answer in stock.generate_all(PROMPTS)]
    assert [ids_of(answer) for answer in asked] == expected * 2


def test_prompts_return_to_where_their_pages_are(front: Front, asked: list[Answer]) -> None:
    first = asked[: len(PROMPTS)]
    assert len({answer.headers[SERVED] for answer in first}) > 1, "they were spread"
    assert not any(map(num_cached, first))
    for _ in range(4):
        before = front.metric(NOWHERE)
        cached = list(map(num_cached, ask_all(front)))
        num_known = LENGTH * len(PROMPTS) - (front.metric(NOWHERE) - before)
        assert num_known >= sum(cached), "it knew of all that was there"
        if cached.count(aligned(LENGTH)) >= len(PROMPTS) - 1:
            return
    pytest.fail(f"{cached} tokens were cached; one server may be slow just then, not more")


def test_chats_are_known_by_their_tokens(front: Front, asked: list[Answer]) -> None:
    text = "".join(map(chr, make_prompts(4601, 1, 400)[0]))
    body = {"model": "default", "messages": [{"role": "user", "content": text}]}

    def is_known() -> bool:
        before = front.metric(NOWHERE)
        usage = json.loads(front.ask(body={**body, "max_tokens": 4}).body)["usage"]
        num_known = usage["prompt_tokens"] - (front.metric(NOWHERE) - before)
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        # The pages may be where chance sends it before the picker is told of them.
        return bool(num_known >= cached > 300)

    eventually(is_known, "it returns to where it knew its pages are", timeout_s=LEARN_S)


def test_death_before_the_first_token_is_not_seen(
    front: Front, cluster: Cluster, asked: list[Answer]
) -> None:
    for scheduler in cluster.schedulers():
        scheduler.suspend()
    found: list[Answer] = []
    asking = threading.Thread(target=lambda: found.append(generate(front, PROMPTS[-1])))
    asking.start()

    def waiting() -> list[str]:
        return [row["address"] for row in front.servers() if row["tokens_sent"]]

    try:
        eventually(waiting, "the request is at a server")
        (holder,) = waiting()
        cluster.kill(holder)
    finally:
        for scheduler in cluster.schedulers():
            scheduler.resume()
    asking.join(60)
    assert found and ids_of(found[0]) == ids_of(asked[-1])
    assert found[0].headers[SERVED] != holder
    eventually(lambda: sum(row["ready"] for row in front.servers()) == NUM_SERVERS - 1)
