"""The flags of ``--tier-log-requests``: what cannot work is one sentence, and touches nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.launch.resolve import _resolve_request_log, resolve

if TYPE_CHECKING:
    from pathlib import Path


def test_file_and_size_become_settings(tmp_path: Path) -> None:
    given = {"tier_log_requests": str(tmp_path / "log"), "tier_log_requests_bytes": "8MiB"}
    config = _resolve_request_log({**given, "dp_size": 2})
    assert config is not None
    assert (config.path, config.max_bytes) == (str(tmp_path / "log"), 8 << 20)
    assert config.num_replicas == 2 and _resolve_request_log({}) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tier_log_requests_bytes": "8MiB"}, "tier-log-requests-bytes 8MiB needs --tier-log-req"),
        ({"tier_log_requests": "/log", "pp_size": 2}, "/log has no meaning with --pp-size 2"),
        ({"tier_log_requests": " "}, "--tier-log-requests is empty; name a file, or drop it"),
        ({"tier_log_requests": "/log", "tier_log_requests_bytes": "9"}, "must be at least 1MiB"),
    ],
)
def test_useless_combination_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        _resolve_request_log(given)


@pytest.mark.parametrize("mode", ["off", "host"])
def test_server_without_nvme_has_no_stories(mode: str) -> None:
    given = {"tier_log_requests": "/log", "tier_mode": mode}
    with pytest.raises(ConfigError, match=f"/log has no meaning with --tier-mode {mode}"):
        resolve(given, [], on_cpu=False)
