"""What is broken on purpose the platform says, by its right name, and of what is right nothing."""

from __future__ import annotations

from typing import Any

import device_handoff
import planted_faults
import pytest
from platform_process import WHEN_WAITED_FOR, environment, run
from zygote import Zygotes

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def said(zygotes: Zygotes, request: pytest.FixtureRequest) -> Any:
    """The last line of a script of this folder."""
    return run(zygotes, *request.param, timeout_s=500, **environment(**WHEN_WAITED_FOR))


@pytest.mark.parametrize("said", [["planted_faults.py"]], indirect=True)
def test_every_planted_fault_is_noticed(said: Any) -> None:
    wanted = {name: sorted(names) for name, (_, names) in planted_faults.FAULTS.items()}
    assert said["found"] == wanted
    seams = {"d2h", "h2d", "host-alloc", "host-free", "device-free", "store", "load"}
    assert seams <= said["ran"].keys()


@pytest.mark.parametrize("said", [["device_handoff.py"]], indirect=True)
def test_pages_arrive_and_each_wait_is_needed(said: Any) -> None:
    """Of a handoff out of a device's pool."""
    assert said == {"as it is": True, **dict.fromkeys(device_handoff.FAULTS, False)}


@pytest.mark.parametrize(
    "said",
    [
        ["checkpoint_race.py", "nothing"],
        pytest.param(["checkpoint_race.py", "split"], marks=pytest.mark.slow),
    ],
    indirect=True,
    ids=["nothing", "split"],
)
def test_checkpoint_waits_for_a_queued_host_copy(said: Any) -> None:
    """SGLang calls a node backed up as soon as its copy is queued. What its host pages held before
    was stored under its keys, and the right store was dropped as a duplicate."""
    assert said["before"] == [] and said["after"] == []
    assert said["answer"] == {"done": True, "tier": "nvme", "num_tokens": 64, "num_missing": 0}
    assert said["stored"] == [True] * 4
