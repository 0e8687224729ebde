"""A hybrid model whose host tier device memory outgrows: host memory is a buffer before NVMe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_models import write_sliding_window

from conftest import ALWAYS, Launch, aligned, ask, make_prompts, outputs, until
from server_process import Answer, Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 700
PROMPTS = make_prompts(11, 6, LENGTH)
WHOLE = aligned(LENGTH)
HERS: dict[str, Any] = {"extra_key": "hers"}
FLAGS = ("--max-total-tokens", "2048", "--hicache-ratio", "0.8", *ALWAYS)


def all_stored(answers: list[Answer]) -> bool:
    return [answer.cached["storage"] for answer in answers] == [WHOLE] * len(PROMPTS)


def refill_device(server: Server, seed: int) -> None:
    """Other prompts take the place of all that the device holds."""
    server.generate_all(make_prompts(seed, 4, LENGTH), concurrency=2)


def store_all(server: Server, prompts: list[list[int]], **whose: Any) -> None:
    for prompt in prompts:
        code, answer = ask(server, "/tier/checkpoint", {"input_ids": prompt, **whose})
        assert code == 200, answer


def wait_until_stored(server: Server, prompt: list[int], **whose: Any) -> None:
    body = {"input_ids": prompt, **whose}
    until(lambda: ask(server, "/tier/residency", body)[1].get("nvme") == WHOLE, "not stored", 60.0)


def test_hybrid_model_in_little_host_memory_comes_back(
    launch: Launch, model: Path, tmp_path: Path
) -> None:
    tiers = ("--tier-dir", str(tmp_path / "kv"), "--tier-nvme-bytes", "256MiB")
    arguments = (*FLAGS, *tiers, "--enable-streaming-session")
    path = write_sliding_window(model, tmp_path / "model")
    server = launch(*arguments, model_path=path)
    computed = server.generate_all(PROMPTS, concurrency=2)
    assert not any(answer.num_cached for answer in computed)
    store_all(server, PROMPTS)
    loaded = server.generate_all(PROMPTS, concurrency=2)
    assert outputs(loaded) == outputs(computed) and all_stored(loaded)

    # What was erased is neither served nor kept from being stored again.
    hers = server.generate(PROMPTS[0], **HERS)
    assert hers.num_cached == 0
    store_all(server, PROMPTS[:1], **HERS)
    for erase in (("/tier/purge", HERS), ("/tier/forget", {"input_ids": PROMPTS[0], **HERS})):
        code, answer = ask(server, *erase)
        assert code == 200, answer
        after = server.generate(PROMPTS[0], **HERS)
        assert after.num_cached == 0 and after.output_ids == hers.output_ids
        wait_until_stored(server, PROMPTS[0], **HERS)  # by itself: no checkpoint asks for it
        refill_device(server, 14)
        after = server.generate(PROMPTS[0], **HERS)
        assert after.cached["storage"] == WHOLE and after.output_ids == hers.output_ids

    # A session's second turn, whose first is no node of the tree.
    opened = server.request("/open_session", {"capacity_of_str_len": 1 << 20, "streaming": True})
    turn: dict[str, Any] = {"session_params": {"id": json.loads(f"{opened}"), "rid": None}}
    first = server.generate(PROMPTS[1], **turn)
    server.generate(make_prompts(15, 1, 200)[0], **turn)
    assert first.output_ids == computed[1].output_ids
    server.flush()
    server.kill()

    restarted = launch(*arguments, model_path=path)
    answers = restarted.generate_all(PROMPTS, concurrency=2)
    assert outputs(answers) == outputs(computed) and all_stored(answers)
    restarted.kill()
