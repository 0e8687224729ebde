"""The ``pod`` attention backend on a live server: mixed batches reach it, tokens stay equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_models import write_sliding_window

from conftest import Launch, make_prompts
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_NEW = 24
# Shorter than a chunk and several chunks long, so that some decode while others are prefilled.
LENGTHS = (40, 300, 90, 180, 61, 250, 150, 299)
PROMPTS = [prompt[:n] for prompt, n in zip(make_prompts(11, 8, 300), LENGTHS, strict=True)]
MIXED = ("--attention-backend", "pod", "--enable-mixed-chunk", "--max-total-tokens", "4096")
UNTIERED = (*MIXED, "--tier-mode", "off", "--chunked-prefill-size", "64")


def served(server: Server) -> dict[str, Any]:
    (state,) = server.request("/server_info")["internal_states"]
    return dict(state["sglang_tiered_pod"])


def asked(server: Server, concurrency: int) -> list[list[int]]:
    answers = server.generate_all(PROMPTS, concurrency=concurrency, num_new=NUM_NEW)
    return [answer.output_ids for answer in answers]


def test_mixed_batches_do_not_change_a_requests_tokens(
    launch: Launch, stock: Server, tmp_path: Path
) -> None:
    """With tiers, since both want to be used together; and those of another backend."""
    # What NVMe holds would come back at once, and leave no chunks to mix with. A chunk is whole
    # pages of 64 after the decode rows are taken off it.
    tiers = ("--tier-dir", str(tmp_path / "kv"), "--tier-host-bytes", "36MiB")
    server = launch(*MIXED, *tiers, "--chunked-prefill-size", "128")
    alone = asked(server, 1)
    assert alone == asked(stock, 1)
    assert served(server)["forwards"] == 0, "one request has no rows to mix"
    assert server.request("/tier/purge", {"all": True})["durable"]
    server.flush()
    assert asked(server, len(PROMPTS)) == alone
    state = served(server)
    # Nobody but the pod backend counts these, and it counts after the kernels returned.
    assert state["forwards"] >= 4
    assert state["layers"] == 3 * state["forwards"]  # the demo model has three layers
    assert state["decode_rows"] >= state["forwards"]
    assert state["other_layers"] == {}
    server.kill()


def test_reference_backend_gives_the_tokens_of_sglangs_own(launch: Launch, stock: Server) -> None:
    """What all others are held against is not held against itself alone."""
    server = launch(*UNTIERED, "--attention-backend", "torch_native")
    assert asked(server, len(PROMPTS)) == asked(stock, 1)
    server.kill()


def test_sliding_windows_and_sinks_survive_mixed_batches(
    launch: Launch, model: Path, tmp_path: Path
) -> None:
    server = launch(*UNTIERED, model_path=write_sliding_window(model, tmp_path / "model"))
    alone = asked(server, 1)
    server.flush()
    assert asked(server, len(PROMPTS)) == alone
    assert served(server)["layers"] >= 12
    assert served(server)["other_layers"] == {}
    server.kill()
