"""What the object tier cannot work with is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_tiered.config import ObjectConfig, cache_directory
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import flags_of, refuse_given
from sglang_tiered.integration.launch.resolve import resolve_object

ALGORITHM, KEY = "AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID"


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({ALGORITHM: "rot13"}, f"{ALGORITHM}=rot13 is unknown; set it to one of AES256"),
        ({KEY: "a-key"}, f"{KEY} needs {ALGORITHM}=aws:kms beside it"),
        ({ALGORITHM: "AES256", KEY: "a-key"}, f"{KEY} needs {ALGORITHM}=aws:kms beside it"),
    ],
)
def test_encryption_that_would_be_ignored_is_refused(
    environment: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=sentence):
        resolve_object({"tier_object_url": "s3://bucket/kv"})


def test_encryption_that_s3_knows_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALGORITHM, "aws:kms")
    monkeypatch.setenv(KEY, "a-key")
    assert resolve_object({"tier_object_url": "s3://bucket/kv"}) is not None


def test_a_refused_object_url_shows_no_credentials() -> None:
    explicit = {"tier_object_url": "s3://me:hunter2@bucket/kv"}
    with pytest.raises(ConfigError, match="--tier-object-url URL needs NVMe") as caught:
        refuse_given(explicit, flags_of(ObjectConfig), "needs NVMe; drop it")
    assert "hunter2" not in str(caught.value)


def test_a_tilde_in_the_cache_directory_is_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    assert cache_directory().is_relative_to(Path.home())
