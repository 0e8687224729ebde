"""The real scheduler on the asynchronous platform: right answers from three tiers and no violation.
What is broken on purpose is noticed in ``planted_faults.py``, by the same seams."""

from __future__ import annotations

from pathlib import Path

import pytest
from platform_process import environment, run
from zygote import Zygotes

from kit.small_model import write_small_model

SEAMS = {
    *("scheduler", "forward", "d2h", "h2d", "host-alloc", "host-free", "device-free"),
    *("store", "load"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "modes", [["random"], pytest.param(["late", "late-forward"], marks=pytest.mark.slow)]
)
def test_delays_change_no_answer_and_violate_nothing(
    zygotes: Zygotes, tmp_path: Path, modes: list[str]
) -> None:
    model = str(write_small_model(tmp_path / "demo"))
    expected = run(zygotes, "scheduler_rounds.py", model, timeout_s=500)["rounds"]
    for mode in modes:
        said = run(zygotes, "scheduler_rounds.py", model, timeout_s=500, **environment(MODE=mode))
        assert "error" not in said, said["error"]
        assert said["violations"] == []
        assert said["rounds"] == expected
        assert said["overlap"]
        assert {"host", "storage"} <= set(said["cached"])
        assert said["seams"].keys() >= SEAMS
        assert said["counts"]["due"] > 0, "nothing was late"
