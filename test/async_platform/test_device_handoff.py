"""The handoff out of a device's pool waits for what it must, and only its waits make it right."""

from __future__ import annotations

import pytest
from device_handoff import FAULTS
from platform_process import WHEN_WAITED_FOR, environment, run
from zygote import Zygotes


@pytest.mark.timeout(300)
def test_pages_arrive_and_each_wait_is_needed(zygotes: Zygotes) -> None:
    said = run(zygotes, "device_handoff.py", timeout_s=240, **environment(**WHEN_WAITED_FOR))
    assert said == {"as it is": True, **dict.fromkeys(FAULTS, False)}
