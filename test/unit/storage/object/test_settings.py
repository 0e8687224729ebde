"""Settings that cannot work are refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.object.settings import ObjectSettings


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"object_bytes": 0}, "object_bytes"),
        ({"object_bytes": 2 << 30}, "at most"),
        ({"object_bytes": 2 << 20, "staging_bytes": 1 << 20}, "must hold one object"),
        ({"linger_s": -1.0}, "linger_s"),
        ({"linger_s": float("nan")}, "linger_s"),
        ({"max_pages": 0}, "max_pages"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"ttl_s": 0.0}, "ttl_s"),
        ({"num_connections": 0}, "num_connections"),
        ({"request_timeout_s": 0.0}, "request_timeout_s"),
        ({"writes_per_day": -5}, "writes_per_day"),
        ({"requests_per_day": 0}, "requests_per_day"),
        ({"codec": ""}, "name of a codec"),
        ({"codec": "x" * 17}, "name of a codec"),
    ],
)
def test_a_value_that_cannot_work_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ObjectSettings(url="memory://", **wrong)


def test_what_has_a_default_needs_no_word() -> None:
    settings = ObjectSettings(url="s3://bucket/prefix")
    assert settings.codec == "none"
    assert settings.staging_bytes >= settings.object_bytes
