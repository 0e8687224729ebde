"""Whatever is broken on purpose the platform says, by its right name; of what is right, nothing."""

from __future__ import annotations

import pytest
from planted_faults import FAULTS
from platform_process import WHEN_WAITED_FOR, environment, run
from zygote import Zygotes


@pytest.mark.timeout(600)
def test_every_planted_fault_is_noticed(zygotes: Zygotes) -> None:
    said = run(zygotes, "planted_faults.py", timeout_s=500, **environment(**WHEN_WAITED_FOR))
    assert said["found"] == {name: sorted(wanted) for name, (_, wanted) in FAULTS.items()}
    seams = {"d2h", "h2d", "host-alloc", "host-free", "device-free", "store", "load"}
    assert seams <= said["ran"].keys()
