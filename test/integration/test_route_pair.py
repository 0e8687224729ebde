"""A real prefill and a real decode server behind a front: Envoy's mirroring makes them a pair."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from route_front import Answer, Front

from conftest import make_prompts
from prefill_decode import PrefillDecode, transfer_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from server_process import Server

pytest.importorskip("envoy")
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = make_prompts(4610, 4, 700)
DEVICE = ("--max-total-tokens", "4096", "--tier-host-bytes", "36MiB")


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefillDecode]:
    folder = tmp_path_factory.mktemp("pair")
    tiers = {role: ("--tier-dir", str(folder / role)) for role in ("prefill", "decode")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "1")
        made = PrefillDecode.spawn(model, folder, *DEVICE, **tiers)
    try:
        made.wait_until_ready()
        yield made
    finally:
        made.kill()


@pytest.fixture(scope="module")
def front(pair: PrefillDecode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    made = Front.start(folder, [pair.prefill.url, pair.decode.url], "--pick-timeout", "2s")
    try:
        made.wait_until_ready(2)
        yield made
    finally:
        made.close()
    assert "Traceback" not in made.log, made.log


def generate(front: Front, prompt: list[int], **more: int) -> Answer:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **more}
    return front.ask("/generate", {"input_ids": prompt, "sampling_params": sampling})


def test_pair_answers_as_one_server(front: Front, pair: PrefillDecode, stock: Server) -> None:
    expected = [answer.output_ids for answer in stock.generate_all(PROMPTS)]
    before = transfer_state(pair.decode)["transfer_rooms_ended:done"]
    answers = [generate(front, prompt) for prompt in PROMPTS]
    assert [answer.status for answer in answers] == [200] * len(PROMPTS)
    assert [json.loads(answer.body)["output_ids"] for answer in answers] == expected
    ended = transfer_state(pair.decode)["transfer_rooms_ended:done"] - before
    assert ended == len(PROMPTS), "each came from prefill"


def test_completions_go_to_a_pair(front: Front, pair: PrefillDecode, stock: Server) -> None:
    """SGLang by itself reads the headers that name the pair at other endpoints only."""
    prompt = make_prompts(4611, 1, 700)[0]
    before = transfer_state(pair.decode)["transfer_rooms_ended:done"]
    body = {"model": "default", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = front.ask("/v1/completions", body)
    assert answer.status == 200, answer
    (choice,) = json.loads(answer.body)["choices"]
    assert choice["token_ids"] == stock.generate(prompt).output_ids
    assert transfer_state(pair.decode)["transfer_rooms_ended:done"] == before + 1


def test_two_samples_have_a_handoff_each(front: Front, stock: Server) -> None:
    answer = generate(front, PROMPTS[0], n=2)
    assert answer.status == 200, answer
    expected = stock.generate(PROMPTS[0]).output_ids
    assert [one["output_ids"] for one in json.loads(answer.body)] == [expected] * 2


def test_dead_prefill_is_told_as_an_error(front: Front, pair: PrefillDecode) -> None:
    pair.prefill.kill()
    answer = generate(front, PROMPTS[1])
    assert answer.status in (500, 502, 503, 504), answer
