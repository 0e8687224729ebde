"""Whatever is broken on purpose the platform says, by its right name; of what is right, nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from planted_faults import FAULTS
from platform_process import WHEN_WAITED_FOR, environment, run

if TYPE_CHECKING:
    from zygote import Zygotes

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def said(zygotes: Zygotes) -> Any:
    return run(zygotes, "planted_faults.py", timeout_s=500, **environment(**WHEN_WAITED_FOR))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(said: Any, name: str) -> None:
    assert set(said["found"][name]) == FAULTS[name][1]


def test_every_seam_of_pools_and_copies_ran(said: Any) -> None:
    seams = {"d2h", "h2d", "host-alloc", "host-free", "device-free", "store", "load", "lesson"}
    assert seams <= said["ran"].keys()
