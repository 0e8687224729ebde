"""The real scheduler on the asynchronous platform: right answers from three tiers and no violation,
and whatever is broken on purpose is noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from platform_process import environment, run

from kit.small_model import write_small_model

if TYPE_CHECKING:
    from collections.abc import Callable

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
    said = run(zygotes, "scheduler_rounds.py", model, "none", timeout_s=500)
    assert "error" not in said, said["error"]
    return said["rounds"]


@pytest.fixture
def rounds(zygotes: Zygotes, model: str) -> Callable[..., Any]:
    """``rounds(mutation, **settings)``: what the scheduler says on the platform."""

    def rounds(mutation: str = "none", **settings: str) -> Any:
        more = environment(**settings)
        return run(zygotes, "scheduler_rounds.py", model, mutation, timeout_s=500, **more)

    return rounds


@pytest.mark.parametrize(
    "mode",
    [
        "random",
        pytest.param("late", marks=pytest.mark.slow),
        pytest.param("late-forward", marks=pytest.mark.slow),
    ],
)
def test_delays_change_no_answer_and_violate_nothing(
    rounds: Callable[..., Any], expected: Any, mode: str
) -> None:
    said = rounds(MODE=mode)
    assert "error" not in said, said["error"]
    assert said["violations"] == []
    assert said["rounds"] == expected
    assert said["overlap"]
    tiers = {tier for cached in said["cached"] for tier, tokens in cached.items() if tokens}
    assert {"host", "storage"} <= tiers
    assert said["seams"].keys() >= SEAMS
    assert said["counts"]["due"] > 0, "nothing was late"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "mode", "noticed"),
    [
        ("nothing_waits_for_loads", "late", "forward-read-before-load"),
        ("copies_count_as_done_at_once", "late", "store-of-poison"),
        ("nodes_are_stored_while_they_are_copied", "late", "store-of-poison"),
        ("copies_begin_at_once_without_a_fence", "late-forward", "d2h-not-ordered-after-writer"),
        ("copies_begin_at_once_without_a_fence", "late-forward", "store-of-poison"),
        ("prefills_teach_twice", "random", "too-many-lessons"),
    ],
)
def test_a_mutation_is_noticed(
    rounds: Callable[..., Any], mutation: str, mode: str, noticed: str
) -> None:
    assert noticed in rounds(mutation, MODE=mode)["violations"]


@pytest.mark.slow
def test_early_copies_behind_their_fence_violate_nothing(
    rounds: Callable[..., Any], expected: Any
) -> None:
    said = rounds("copies_begin_at_once", MODE="late-forward")
    assert said["violations"] == []
    assert said["rounds"] == expected
