"""Model families with windows: every tier gives back what was computed, also after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from family_models import write_gemma3, write_sliding_window

from conftest import ALWAYS, Launch, aligned, make_prompts
from server_process import Answer

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 700
PROMPTS = make_prompts(7, 6, LENGTH)


def outputs(answers: list[Answer]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


def tokens_from(answers: list[Answer], tier: str) -> int:
    return sum(answer.cached[tier] for answer in answers)


@pytest.mark.parametrize(
    ("write", "pools"),
    [
        # With one pool its KV is to the tiers like any other's.
        pytest.param(write_gemma3, "pools=KV,", id="one_pool", marks=pytest.mark.long),
        pytest.param(write_sliding_window, "pools=Full + SWA,", id="pool_of_its_own"),
    ],
)
def test_family_comes_back_from_every_tier(
    write: Callable[[Path, Path], Path], pools: str, launch: Launch, model: Path, tmp_path: Path
) -> None:
    path = write(model, tmp_path / "model")
    # Device memory holds two of the prompts, the host tier all of them.
    arguments = (
        *("--max-total-tokens", "2048", "--tier-host-bytes", "64MiB", *ALWAYS),
        *("--tier-dir", str(tmp_path / "kv"), "--tier-nvme-bytes", "256MiB"),
    )
    whole = aligned(LENGTH) * len(PROMPTS)
    server = launch(*arguments, model_path=path)
    assert pools in server.log
    computed = server.generate_all(PROMPTS, concurrency=2)
    assert all(answer.num_cached == 0 for answer in computed)
    assert len({tuple(answer.output_ids) for answer in computed}) == len(PROMPTS)

    loaded = server.generate_all(PROMPTS, concurrency=2)
    assert outputs(loaded) == outputs(computed)
    assert tokens_from(loaded, "host") >= 0.6 * whole
    server.flush()
    from_storage = server.generate_all(PROMPTS, concurrency=2)
    assert outputs(from_storage) == outputs(computed)
    assert tokens_from(from_storage, "storage") == whole
    server.kill()

    restarted = launch(*arguments, model_path=path)
    after = restarted.generate_all(PROMPTS, concurrency=2)
    assert outputs(after) == outputs(computed)
    assert tokens_from(after, "storage") == whole
    restarted.kill()
