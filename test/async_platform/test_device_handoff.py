"""The handoff out of a device's pool waits for what it must, and only its waits make it right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from device_handoff import FAULTS
from platform_process import WHEN_WAITED_FOR, environment, run

if TYPE_CHECKING:
    from zygote import Zygotes

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def said(zygotes: Zygotes) -> Any:
    return run(zygotes, "device_handoff.py", timeout_s=240, **environment(**WHEN_WAITED_FOR))


def test_pages_arrive_however_late_copies_end(said: Any) -> None:
    assert said["as_it_is"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_missing_wait_sends_or_keeps_other_bytes(said: Any, fault: Any) -> None:
    assert not said[fault.__name__]
