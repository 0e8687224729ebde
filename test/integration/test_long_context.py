"""A context of 100,000 tokens: it reaches NVMe whole, and its next turn comes from there."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_models import write_long_context

from conftest import PAGE, Launch, aligned, make_prompts
from server_process import Answer

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.long,  # two prefills of a minute or two each
    pytest.mark.timeout(1800),
]

LENGTH, TURN, NUM_NEW = 100_000, 500, 16
POOL = ("--max-total-tokens", str(LENGTH + 4096))


def test_turn_of_a_hundred_thousand_tokens_returns(
    launch: Launch, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server_process.REQUEST_DEADLINE_S", 600.0)
    long_context = write_long_context(demo_model, tmp_path / "model", 1 << 17)
    (context,), (turn,) = make_prompts(51, 1, LENGTH), make_prompts(52, 1, TURN)

    def ask(*arguments: str) -> tuple[Answer, Answer]:
        server = launch(*POOL, *arguments, model_path=long_context)
        try:
            first = server.generate(context, NUM_NEW)
            if "off" not in arguments:
                server.wait_for_state("tier_pages:nvme", aligned(LENGTH) // PAGE)
                server.flush()
            return first, server.generate(context + first.output_ids + turn, NUM_NEW)
        finally:
            server.kill()

    first, second = ask("--tier-dir", str(tmp_path / "kv"))
    expected = ask("--tier-mode", "off")
    assert [first.output_ids, second.output_ids] == [each.output_ids for each in expected]
    assert second.cached["storage"] == aligned(LENGTH + NUM_NEW)
