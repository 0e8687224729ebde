"""The table of seams is complete, and a difference in another SGLang is named with both sides."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_tiered.errors import UnsupportedSGLangError
from sglang_tiered.integration import compat
from sglang_tiered.integration.launch import start
from sglang_tiered.integration.seams import Seam, compare, imports_of


@pytest.fixture(scope="module")
def relied_on() -> dict[str, Any]:
    """From a process of its own, for it imports all of SGLang that a server may, and its end with
    that is not ours to judge."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("relied_on.py")],
        stdout=subprocess.PIPE,
        check=False,
        timeout=280,
    )
    return json.loads(done.stdout)


def test_every_hooked_name_is_asserted(relied_on: dict[str, Any]) -> None:
    assert len(relied_on["hooked"]) > 30
    assert set(relied_on["hooked"]) <= set(relied_on["asserted"])


def test_every_overridden_method_is_asserted(relied_on: dict[str, Any]) -> None:
    """One that SGLang renames would be dropped without a word."""
    overridden, asserted = relied_on["overridden"], set(relied_on["asserted"])
    assert len(overridden) > 60
    assert not [ours for ours, names in overridden.items() if not set(names) & asserted]


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


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of SGLang in a copy that imports under a name of its own."""
    import sglang.srt.mem_cache.storage_prefetch as original

    place = tmp_path / "copied_prefetch.py"
    shutil.copy(original.__file__, place)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "copied_prefetch", raising=False)
    return place


TARGET = "copied_prefetch:StoragePrefetchRetries.refetch"
EXPECTED = ("self", "req_id", "storage_hit_end")


def test_a_changed_signature_shows_both_sides(copy: Path) -> None:
    text = copy.read_text(encoding="utf-8")
    assert text.count("storage_hit_end") > 1
    copy.write_text(text.replace("storage_hit_end", "hit_end"), encoding="utf-8")
    (seam,) = compare({TARGET: EXPECTED}, "ours")
    assert seam == Seam(
        TARGET, "ours", "changed", "(self, req_id, storage_hit_end)", "(self, req_id, hit_end)"
    )
    with pytest.raises(UnsupportedSGLangError, match=r"refetch takes .* without storage_hit_end;"):
        compat.check_signatures({TARGET: EXPECTED})


def test_all_missing_seams_are_named_at_once(copy: Path) -> None:
    text = copy.read_text(encoding="utf-8").replace("def refetch(", "def fetch_again(")
    copy.write_text(text, encoding="utf-8")
    table = {TARGET: EXPECTED, "sglang.no_such_module:x": (), "json:dumps": ("obj",)}
    refetch, module, dumps = compare(table, "ours")
    assert (refetch.status, module.status, dumps.status) == ("missing", "missing", "ok")
    assert "refetch" in refetch.found
    assert "no_such_module" in module.found


def test_a_package_missing_here_is_not_sglangs_fault(copy: Path) -> None:
    text = copy.read_text(encoding="utf-8")
    copy.write_text(f"{text}\nimport no_such_cuda_package\n", encoding="utf-8")
    (seam,) = compare({TARGET: EXPECTED}, "ours")
    assert seam.status == "unchecked"
    assert "no_such_cuda_package" in seam.found


def test_imports_for_types_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        textwrap.dedent("""
            from typing import TYPE_CHECKING
            from sglang.a import one
            if TYPE_CHECKING:
                from sglang.b import two
            def use():
                from sglang import three
                import sglang.c
            """)
    )
    found = {(item.module, item.name) for item in imports_of(tmp_path)}
    assert found == {("sglang.a", "one"), ("sglang", "three"), ("sglang.c", "")}


def test_an_import_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang only logs what its plugins raise."""
    from sglang.srt.mem_cache import registry

    monkeypatch.delattr(registry, "create_unified_radix_cache")
    monkeypatch.delitem(sys.modules, "sglang_tiered.integration.cache.factory")
    with pytest.raises(UnsupportedSGLangError, match=r"lacks what .*factory imports \(.*; rei"):
        compat.check_imports()


def test_an_unlisted_version_runs_for_its_check_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start.compat, "SUPPORTED_VERSIONS", ("0.0.1",))
    monkeypatch.setenv(compat.CHECKED_VERSION, "0.0.2")
    with pytest.raises(UnsupportedSGLangError):
        compat.check_version()
    monkeypatch.setenv(compat.CHECKED_VERSION, importlib.metadata.version("sglang"))
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


def test_no_target_is_hooked_twice() -> None:
    """Which of two is called first is said nowhere, and the second may lack what the first did."""
    assert HookRegistry._hooks
    assert not [target for target, found in HookRegistry._hooks.items() if len(found) > 1]
