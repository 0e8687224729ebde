"""Settings that cannot work are refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.bucket import BucketSettings


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"staging_bytes": 0}, "staging_bytes"),
        ({"refresh_s": float("nan")}, "refresh_s"),
        ({"max_pages": 0}, "max_pages"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"ttl_s": 0.0}, "ttl_s"),
        ({"num_connections": 0}, "num_connections"),
        ({"request_timeout_s": 0.0}, "request_timeout_s"),
        ({"writes_per_day": -5}, "writes_per_day"),
        ({"requests_per_day": 0}, "requests_per_day"),
    ],
)
def test_a_value_that_cannot_work_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BucketSettings(url="memory://", **wrong)


def test_what_has_a_default_needs_no_word() -> None:
    settings = BucketSettings(url="s3://bucket/prefix")
    assert settings.max_page_bytes == settings.staging_bytes
