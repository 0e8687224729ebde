"""A real prefill and a real decode server behind a front: Envoy's mirroring makes them a pair."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from route_front import Front

from conftest import make_prompts
from kit.waiting import eventually
from prefill_decode import PrefillDecode, transfer_state
from server_process import Server

pytest.importorskip("envoy")
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = make_prompts(4610, 4, 700)
LONG = 3000
DEVICE = (
    *("--max-total-tokens", "4096", "--tier-host-bytes", "36MiB"),
    *("--chunked-prefill-size", "256"),  # a handoff takes a while
)


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefillDecode]:
    folder = tmp_path_factory.mktemp("pair")
    tiers = {role: ("--tier-dir", str(folder / role)) for role in ("prefill", "decode")}
    with PrefillDecode.spawn(model, folder, *DEVICE, **tiers) as made:
        yield made


@pytest.fixture(scope="module")
def front(pair: PrefillDecode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    urls = [pair.prefill.url, pair.decode.url]
    folder = tmp_path_factory.mktemp("front")
    with closing(Front.start(folder, urls, "--pick-timeout", "2s")) as made:
        made.wait_until_ready(2)
        yield made
    assert "Traceback" not in made.log, made.log


def rooms(pair: PrefillDecode) -> float:
    return sum(transfer_state(one)["transfer_rooms"] for one in (pair.prefill, pair.decode))


def test_pair_answers_as_one_server(front: Front, pair: PrefillDecode, stock: Server) -> None:
    """SGLang by itself reads the headers that name the pair at one endpoint only, and gives all
    samples of a prompt one room: one client's ``n`` was 500 after 500."""
    expected = [answer.output_ids for answer in stock.generate_all(PROMPTS)]
    before = transfer_state(pair.decode)["transfer_rooms_ended:done"]
    answers = [front.generate(prompt) for prompt in PROMPTS]
    assert [json.loads(answer.body)["output_ids"] for answer in answers] == expected
    body = {"model": "default", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "n": 4}
    answer = front.ask("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
    assert answer.status == 200, answer
    choices = json.loads(answer.body)["choices"]
    assert [choice["token_ids"] for choice in choices] == [expected[0]] * 4
    ended = transfer_state(pair.decode)["transfer_rooms_ended:done"] - before
    assert ended >= len(PROMPTS) + 4, "each came from prefill"
    eventually(lambda: rooms(pair) == 0, "none is left")


def leave(front: Front, seed: int, when: Callable[[], object]) -> None:
    """Ask for something long, and go."""
    body = {"input_ids": make_prompts(seed, 1, LONG)[0], "sampling_params": {"max_new_tokens": 64}}
    with front.connected() as client:
        client.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        eventually(when, "it has come so far")


def test_client_that_leaves_frees_both(front: Front, pair: PrefillDecode) -> None:
    """Envoy ends decode's request alone; the mirrored one ends by the handoff."""
    leave(front, 4612, lambda: transfer_state(pair.decode)["transfer_rooms"] >= 1)
    eventually(lambda: rooms(pair) == 0, "none is left")


def test_client_that_left_early_frees_prefill(front: Front, pair: PrefillDecode) -> None:
    """Decode has not heard of its request, so it ends nothing: prefill waited for a minute."""
    process = psutil.Process(pair.decode.process.pid)  # that of HTTP
    process.suspend()
    try:
        leave(front, 4613, lambda: transfer_state(pair.prefill)["transfer_rooms"] >= 1)
        eventually(lambda: transfer_state(pair.prefill)["transfer_rooms"] == 0, "it gives up")
    finally:
        process.resume()
    front.wait_until_ready(2)
    assert front.generate(PROMPTS[0]).status == 200


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_killed_half_is_an_error_until_its_successor(
    front: Front, pair: PrefillDecode, stock: Server, role: str
) -> None:
    """Of the requests that it had; with no other to go to."""
    prompts = make_prompts(4620 + len(role), 3, LONG)
    with ThreadPoolExecutor(len(prompts)) as pool:
        doomed = [pool.submit(front.generate, prompt) for prompt in prompts]
        eventually(lambda: transfer_state(pair.prefill)["transfer_rooms"] >= 1, "a handoff")
        getattr(pair, role).kill()
        statuses = {future.result(60).status for future in doomed}
    assert statuses <= {200, 500, 502, 503} and statuses != {200}, statuses
    if role == "prefill":  # what was tried again waits there for the other, and takes no memory
        eventually(lambda: transfer_state(pair.decode)["transfer_rooms"] == 0, "none is left")
    eventually(lambda: front.generate(PROMPTS[0]).status == 503, "it is missed")
    pair.restart(role)
    front.follow([pair.prefill.url, pair.decode.url])
    front.wait_until_ready(2)
    answer = front.generate(PROMPTS[0])
    assert json.loads(answer.body)["output_ids"] == stock.generate(PROMPTS[0]).output_ids
