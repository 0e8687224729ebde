"""The table of seams is complete, and a difference in another SGLang is named with both sides."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache import registry
from sglang.srt.plugins.hook_registry import HookRegistry

from kit.commands import ran
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration import compat
from sglang_tiered.integration.seams import compare


@pytest.fixture(scope="module")
def relied_on() -> dict[str, Any]:
    """From a process of its own, for it imports all of SGLang that a server may, and its end with
    that is not ours to judge."""
    done = ran(sys.executable, Path(__file__).with_name("relied_on.py"), timeout_s=280)
    return json.loads(done.stdout)


def test_every_overridden_method_is_asserted(relied_on: dict[str, Any]) -> None:
    """One that SGLang renames would be dropped without a word. Each hooked name is asserted too."""
    overridden, asserted = relied_on["overridden"], set(relied_on["asserted"])
    assert len(overridden) > 60 and len(relied_on["hooked"]) > 30
    assert not [ours for ours, names in overridden.items() if not set(names) & asserted]
    assert set(relied_on["hooked"]) <= asserted


def test_every_seam_is_in_the_installed_sglang(relied_on: dict[str, Any]) -> None:
    """All names that ``integration`` imports, too."""
    assert relied_on["version"] == importlib.metadata.version("sglang")
    assert relied_on["plugin"] == ""
    assert len(relied_on["seams"]) > 300
    assert not [
        seam
        for seam in relied_on["seams"]
        if seam["status"] != "ok" and "sgl_kernel" not in seam["found"]
    ]


@pytest.mark.parametrize(
    ("target", "expected", "status", "sentence"),
    [
        ("sglang.srt.mem_cache.registry:no_such_seam", (), "missing", "has no .*no_such_seam"),
        ("sglang.no_such_module:x", (), "missing", "has no sglang.no_such_module"),
        ("json:dumps", ("obj", "colour"), "changed", "without colour"),
    ],
)
def test_changed_seam_is_named(
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    expected: tuple[str, ...],
    status: str,
    sentence: str,
) -> None:
    table = {target: expected}
    assert [seam.status for seam in compare(table, "ours")] == [status]
    monkeypatch.setattr(compat, "_SIGNATURES", table)
    with pytest.raises(ConfigError, match=sentence):
        compat.check_signatures()


def test_an_import_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang only logs what its plugins raise, and serves without tiers."""
    monkeypatch.delattr(registry, "create_unified_radix_cache")
    monkeypatch.delitem(sys.modules, "sglang_tiered.integration.cache.factory")
    with pytest.raises(ConfigError, match=r"lacks what .*factory imports \("):
        compat.check_imports()


def test_no_target_is_hooked_twice() -> None:
    """Which of two is called first is said nowhere, and the second may lack what the first did."""
    assert HookRegistry._hooks
    assert not [target for target, found in HookRegistry._hooks.items() if len(found) > 1]
