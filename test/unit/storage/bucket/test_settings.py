"""Settings that cannot work are refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.bucket import BucketSettings


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("staging_bytes", 0), ("refresh_s", float("nan")), ("max_pages", 0)),
        *(("capacity_bytes", 0), ("ttl_s", 0.0), ("num_connections", 0)),
        *(("request_timeout_s", 0.0), ("writes_per_day", -5), ("requests_per_day", 0)),
    ],
)
def test_a_value_that_cannot_work_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        BucketSettings(url="memory://", **{name: wrong})
