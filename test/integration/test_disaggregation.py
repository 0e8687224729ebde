"""Prefill and decode on different servers give what one server gives, and survive each other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conftest import PAGE, make_prompts, residency, until
from kit.small_model import write_small_model
from prefill_decode import PrefillDecode, post, transfer_state
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

SMALL = (
    *("--max-total-tokens", "16384", "--chunked-prefill-size", "512"),
    *("--tier-host-bytes", "64MiB", "--tier-nvme-bytes", "256MiB", "--tier-load", "always"),
)
MOVED = ("transfer_bytes:wire", "transfer_bytes:same_host")
LENGTHS = (1, 2, 15, 64, 65, 511, 512, 513, 1200, 3000)

Pair = PrefillDecode


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefillDecode]:
    """Both roles, with their tiers on."""
    logs, tiers = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("tiers")
    pair = PrefillDecode.spawn(
        model,
        logs,
        *SMALL,
        prefill=("--tier-dir", str(tiers / "prefill")),
        decode=("--tier-dir", str(tiers / "decode")),
    )
    try:
        pair.wait_until_ready()
        yield pair
    finally:
        pair.kill()


def test_handoff_of_any_prompt_length_keeps_the_answer(pair: Pair, stock: Server) -> None:
    prompts = [make_prompts(length, 1, length)[0] for length in LENGTHS]
    for prompt in prompts:
        assert pair.generate(prompt).output_ids == stock.generate(prompt).output_ids, len(prompt)
    for server in (pair.prefill, pair.decode):
        state = transfer_state(server)
        assert state["transfer_rooms_ended:done"] >= len(LENGTHS)
        assert not state["transfer_rooms_ended:failed"]


def moved(pair: Pair) -> float:
    """Bytes that were handed over so far."""
    state = transfer_state(pair.decode)
    return sum(state[name] for name in MOVED)


def test_pages_that_decode_holds_are_not_sent(pair: Pair, stock: Server) -> None:
    """On its device, and then on its NVMe alone."""
    before = moved(pair)
    pair.generate(make_prompts(79, 1, 64)[0])
    one_page = moved(pair) - before
    asked = make_prompts(77, 1, 2000)[0]
    asked += pair.generate(asked).output_ids
    for seed in (78, 81):
        longer, before = [*asked, *make_prompts(seed, 1, 100)[0]], moved(pair)
        assert pair.generate(longer).output_ids == stock.generate(longer).output_ids
        assert 0 < moved(pair) - before <= 4 * one_page  # of the 33 pages the prompt has
        until(lambda: residency(pair.decode, asked)["nvme"] >= 2000 // PAGE * PAGE)
        pair.decode.flush()


def test_concurrent_handoffs_with_shared_prefixes_do_not_mix(pair: Pair, stock: Server) -> None:
    source = random.Random(5)
    base = make_prompts(80, 1, 600)[0]
    prompts = [
        base[: source.randrange(1, 600)] + make_prompts(index, 1, source.randrange(1, 200))[0]
        for index in range(64)
    ]
    got = pair.generate_all(prompts, concurrency=64)
    want = stock.generate_all(prompts, concurrency=64)
    assert [reply.output_ids for reply in got] == [answer.output_ids for answer in want]


@pytest.mark.parametrize("num_samples", [1, 4])
def test_samples_and_lists_equal_those_of_one_server(
    pair: Pair, stock: Server, num_samples: int
) -> None:
    """SGLang gives all samples of a prompt one room; the second ended in 500 on both sides."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "n": num_samples}
    first, *prompts = make_prompts(90 + num_samples, 3, 150)
    lists = {"bootstrap_room": [700 + num_samples, 800 + num_samples]}
    for prompt, rooms in ((first, {}), (prompts, {}), (prompts[::-1], lists)):
        asked = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        reply = pair.both(prompt, **asked, **rooms)[1]
        assert reply.status == 200, reply.error
        want = post(stock, asked).body
        assert said(reply.body) == said(want)
        assert pair.generate(make_prompts(99, 1, 20)[0]).status == 200


def said(body: Any) -> list[list[int]]:
    """Tokens of every choice, in order."""
    return [choice["output_ids"] for choice in (body if isinstance(body, list) else [body])]


def test_one_room_for_two_prompts_serves_both(pair: Pair, stock: Server) -> None:
    """Prefill may hear of one first and decode of the other; each got the other's KV then."""
    prompts = make_prompts(88, 8, 200)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(pair.generate, prompt, bootstrap_room=7) for prompt in prompts]
        got = [future.result(60).output_ids for future in asked]
    assert got == [answer.output_ids for answer in stock.generate_all(prompts)]


def test_abort_on_prefill_ends_the_request_on_decode(pair: Pair) -> None:
    """Upstream, decode waits its full timeout of five minutes."""
    # Behind enough prompts that it still waits for its prefill when it is aborted.
    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(pair.generate, prompt) for prompt in make_prompts(82, 8, 3000)]
        until(lambda: transfer_state(pair.prefill)["transfer_rooms"] >= 6)
        doomed = pool.submit(pair.both, make_prompts(83, 1, 3000)[0], 8, rid="doomed")

        def aborted() -> bool:
            """Asked for until it takes effect: the request may not have arrived yet."""
            pair.prefill.request("/abort_request", {"rid": "doomed"})
            return doomed.done()

        until(aborted)
        _, decoded = doomed.result()
        assert all(future.result(60).status == 200 for future in others)
    assert decoded.status != 200 or len(decoded.output_ids) < 8, "it was done before the abort"
    assert "abort" in decoded.error.lower()


# The last: a server whose weights were replaced equals no fresh one.
def test_other_weights_are_refused_on_both_sides(pair: Pair, model: Path, tmp_path: Path) -> None:
    """A rolling update: one side is ahead, then both are level again."""
    other, (prompt, again) = write_small_model(tmp_path / "other", seed=2), make_prompts(91, 2, 700)
    expected, told = pair.generate(prompt).output_ids, "/update_weights_from_disk"
    assert pair.prefill.request(told, {"model_path": str(other)})["success"]
    before = moved(pair)
    for reply in (*pair.both(again), pair.generate(prompt)):  # of which decode's memory has all
        assert reply.status == 503
        for role, server in (("decode", pair.decode), ("prefill", pair.prefill)):
            assert f"{role} at 127.0.0.1:{server.port}" in reply.error, reply.error
    assert moved(pair) == before
    assert pair.decode.request(told, {"model_path": str(other)})["success"]
    after = pair.generate(prompt)
    assert after.status == 200 and after.output_ids != expected
