"""An SGLang that is not the one we checked is refused with one sentence."""

from __future__ import annotations

import importlib.metadata

import pytest

from sglang_tiered.errors import UnsupportedSGLangError
from sglang_tiered.integration import compat


def test_installed_sglang_has_every_seam() -> None:
    compat.check_version()
    compat.check_signatures()


def test_other_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.99")
    with pytest.raises(UnsupportedSGLangError, match=r"sglang 0\.5\.99 .* install sglang==0"):
        compat.check_version()


def test_missing_sglang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UnsupportedSGLangError, match="sglang is not installed"):
        compat.check_version()


@pytest.mark.parametrize(
    ("target", "expected", "sentence"),
    [
        ("sglang.srt.mem_cache.registry:no_such_seam", (), "has no .*no_such_seam"),
        ("sglang.no_such_module:x", (), "has no sglang.no_such_module"),
        ("json:dumps", ("obj", "colour"), "without colour"),
    ],
)
def test_changed_seam_is_named(
    monkeypatch: pytest.MonkeyPatch, target: str, expected: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.setattr(compat, "_SIGNATURES", {target: expected})
    with pytest.raises(UnsupportedSGLangError, match=sentence):
        compat.check_signatures()
