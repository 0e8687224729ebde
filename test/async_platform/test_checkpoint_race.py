"""A checkpoint never stores a page before its copy from the device is done, and still stores it."""

from __future__ import annotations

import pytest
from platform_process import WHEN_WAITED_FOR, environment, run
from zygote import Zygotes

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("meanwhile", ["nothing", pytest.param("split", marks=pytest.mark.slow)])
def test_checkpoint_waits_for_a_queued_host_copy(zygotes: Zygotes, meanwhile: str) -> None:
    """SGLang calls a node backed up as soon as its copy is queued. What its host pages held before
    was stored under its keys, and the right store was dropped as a duplicate."""
    settings = environment(**WHEN_WAITED_FOR)
    said = run(zygotes, "checkpoint_race.py", meanwhile, timeout_s=250, **settings)
    assert said["before"] == [] and said["after"] == []
    assert said["answer"] == {"done": True, "tier": "nvme", "num_tokens": 64, "num_missing": 0}
    assert said["stored"] == [True] * 4
