"""The real scheduler on the asynchronous platform: right answers from three tiers and no violation.
What is broken on purpose is noticed in ``planted_faults.py``, by the same seams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from platform_process import environment, run

from kit.small_model import write_small_model

if TYPE_CHECKING:
    from zygote import Zygotes

pytestmark = pytest.mark.timeout(600)

SEAMS = {"scheduler", "forward", "d2h", "h2d", "host-alloc", "host-free", "device-free"} | {
    *("store", "load", "lesson")
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_small_model(tmp_path_factory.mktemp("model") / "demo"))


@pytest.fixture(scope="module")
def expected(zygotes: Zygotes, model: str) -> Any:
    """What the same scheduler answers where copies are done when their calls return."""
    said = run(zygotes, "scheduler_rounds.py", model, timeout_s=500)
    assert "error" not in said, said["error"]
    return said["rounds"]


@pytest.mark.parametrize(
    "mode",
    [
        "random",
        pytest.param("late", marks=pytest.mark.slow),
        pytest.param("late-forward", marks=pytest.mark.slow),
    ],
)
def test_delays_change_no_answer_and_violate_nothing(
    zygotes: Zygotes, model: str, expected: Any, mode: str
) -> None:
    said = run(zygotes, "scheduler_rounds.py", model, timeout_s=500, **environment(MODE=mode))
    assert "error" not in said, said["error"]
    assert said["violations"] == []
    assert said["rounds"] == expected
    assert said["overlap"]
    tiers = {tier for cached in said["cached"] for tier, tokens in cached.items() if tokens}
    assert {"host", "storage"} <= tiers
    assert said["seams"].keys() >= SEAMS
    assert said["counts"]["due"] > 0, "nothing was late"
