"""A context of 100,000 tokens: it reaches NVMe whole, and its next turn comes from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import ALWAYS, PAGE, Launch, aligned, make_prompts
from server_process import Answer
from sglang_tiered.demo.model import Shape, write_model

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

LENGTH, NUM_NEW = 100_000, 16
# Attention is nearly all of the work: with one head a CPU computes so many tokens in minutes.
SHAPE = Shape(128, num_layers=1, num_kv_heads=1, intermediate_size=256, num_query_heads=1)


def test_turn_of_a_hundred_thousand_tokens_returns(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server_process.REQUEST_DEADLINE_S", 600.0)
    monkeypatch.setattr("sglang_tiered.demo.model.MAX_POSITIONS", 1 << 17)
    write_model(tmp_path / "model", 0, SHAPE)
    (context,), (turn,) = make_prompts(51, 1, LENGTH), make_prompts(52, 1, 500)

    def ask(*arguments: str) -> tuple[Answer, Answer]:
        size = ("--max-total-tokens", str(LENGTH + 4096))
        server = launch(*size, *arguments, model_path=tmp_path / "model")
        first = server.generate(context, NUM_NEW)
        if "off" not in arguments:
            server.wait_for_state("tier_pages:nvme", aligned(LENGTH) // PAGE)
            server.flush()
        second = server.generate(context + first.output_ids + turn, NUM_NEW)
        server.kill()
        return first, second

    first, second = ask("--tier-dir", str(tmp_path / "kv"), *ALWAYS)
    expected = ask("--tier-mode", "off")
    assert [first.output_ids, second.output_ids] == [each.output_ids for each in expected]
    assert second.cached["storage"] == aligned(LENGTH + NUM_NEW)
