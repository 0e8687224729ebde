"""Windows in a pool of their own: every tier gives back what was computed, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_models import write_sliding_window

from conftest import ALWAYS, Launch, aligned, make_prompts
from server_process import Answer

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 700
PROMPTS = make_prompts(7, 6, LENGTH)
WHOLE = aligned(LENGTH) * len(PROMPTS)


def test_family_comes_back_from_every_tier(launch: Launch, model: Path, tmp_path: Path) -> None:
    path = write_sliding_window(model, tmp_path / "model")
    # Device memory holds two of the prompts, the host tier all of them.
    arguments = (
        *("--max-total-tokens", "2048", "--tier-host-bytes", "64MiB", *ALWAYS),
        *("--tier-dir", str(tmp_path / "kv"), "--tier-nvme-bytes", "256MiB"),
    )
    server = launch(*arguments, model_path=path)
    assert "pools=Full + SWA," in server.log
    computed = server.generate_all(PROMPTS, concurrency=2)
    expected = [answer.output_ids for answer in computed]
    assert not any(answer.num_cached for answer in computed)
    assert len(set(map(tuple, expected))) == len(PROMPTS)

    def tokens_from(tier: str) -> int:
        answers: list[Answer] = server.generate_all(PROMPTS, concurrency=2)
        assert [answer.output_ids for answer in answers] == expected
        return sum(answer.cached[tier] for answer in answers)

    assert tokens_from("host") >= 0.6 * WHOLE
    server.flush()
    assert tokens_from("storage") == WHOLE
    server.kill()
    server = launch(*arguments, model_path=path)
    assert tokens_from("storage") == WHOLE
