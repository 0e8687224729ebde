"""A version passes if nothing differs and every test that ran passed. What it requires is met in
its folder, and never by a CUDA package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest

from kit.commands import ran
from sglang_tiered.errors import ConfigError
from version_check import command, overlay, smoke
from version_check.command import Check
from version_check.overlay import Overlay, Unmet, requirements_of, unmet_of
from version_check.smoke import Outcome, outcome_of

ROOT = Path(__file__).resolve().parents[3]

REPORT = """
<testsuites><testsuite>
<testcase classname="test_a" name="test_one"/>
<testcase classname="test_a" name="test_two"><skipped message="needs a GPU"/></testcase>
<testcase classname="test_a" name="test_three"><failure message="AssertionError: assert 1 == 2">
    assert 1 == 2
E   assert 1 == 2
</failure></testcase>
<testcase classname="test_a" name="test_four"><failure message="x">E   assert 1 == 2</failure></testcase>
<testcase classname="" name="test_b"><error message="collection failure">
E   ImportError: cannot import name 'gone' from 'sglang.srt'
</error></testcase>
</testsuite></testsuites>
"""  # noqa: E501


def seam(status: Literal["ok", "changed", "missing", "unchecked"]) -> dict[str, str]:
    return {"name": "a:b", "status": status, "expected": "(x)", "found": "(y)"}


def checked(*statuses: Literal["ok", "changed", "missing", "unchecked"], plugin: str = "") -> Check:
    outcome = Outcome("units", 3, 0, 1.0)
    unmet = Unmet("new", "==1", None, "absent")
    seams = tuple(seam(status) for status in statuses)
    return Check(Overlay("9.9.9", None, (unmet,)), seams, plugin, (outcome,))


def test_failures_are_counted_by_their_reason() -> None:
    outcome = outcome_of("units", ElementTree.fromstring(REPORT), 2.0)
    assert (outcome.passed, outcome.failed, outcome.is_good) == (1, 3, False)
    assert outcome.reasons == (
        "2 x assert 1 == 2 (test_three)",
        "1 x ImportError: cannot import name 'gone' from 'sglang.srt' (test_b)",
    )


def test_a_run_without_tests_is_no_success() -> None:
    outcome = outcome_of("live", ElementTree.fromstring("<testsuites/>"), 1.0)
    assert not outcome.is_good
    assert outcome.reasons == ("no test ran",)


def test_each_kind_of_difference_fails_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert checked("ok", "unchecked").is_good
    for bad in (checked("ok", "changed"), checked("missing"), checked("ok", plugin="why")):
        assert not bad.is_good
    command.show([checked("changed", "missing", "unchecked", plugin="why")])
    out = capsys.readouterr().out
    assert "a:b: expected (x), there is (y)" in out
    assert "new==1 (absent; .venv has none)" in out
    assert "plugin       why" in out
    assert "passed: 3 of 3, 1 s" in out


def test_every_smoke_test_is_there() -> None:
    for chosen in (path for paths in smoke.PARTS.values() for path in paths):
        path, _, test = chosen.partition("::")
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


# ---- What it requires ----


HERE = {"openai": "2.8.0", "torch": "2.13.0+cpu", "numpy": "2.3.5"}
PINNED = ["openai==2.8.0", "torch==2.14.1", "flashinfer_python[cu13]==0.7.2", "numpy"]
OF_OTHERS = ("openai==1; sys_platform == 'win32'", "openai==1; extra == 'test'")
CUDA = ("torch==2.15.0", "flashinfer-python==0.7.1")


@pytest.mark.parametrize(
    ("lines", "extra", "treated"),
    [
        (("openai==2.6.1", "numpy"), (), {"openai": "installed"}),
        (CUDA, (), {"torch": "left out", "flashinfer-python": "left out"}),
        (("cuda-tile==1.6",), (), {"cuda-tile": "absent"}),
        (("cuda-tile==1.6",), ("cuda_tile",), {"cuda-tile": "installed"}),
        (OF_OTHERS, (), {}),
    ],
    ids=["beside", "never of CUDA", "a new one", "on demand", "of other machines"],
)
def test_what_a_version_needs_is_treated_so(
    lines: tuple[str, ...], extra: tuple[str, ...], treated: dict[str, str]
) -> None:
    found = unmet_of(requirements_of(lines), requirements_of(PINNED), HERE.get, extra)
    assert {one.name: one.treatment for one in found} == treated


def test_the_folder_decides_version_and_entry_points(tmp_path: Path) -> None:
    """Metadata of the environment's SGLang stays hidden behind the folder's."""
    info = tmp_path / "sglang-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nother = json:dumps\n")
    script = (
        "import importlib.metadata as m; print(m.version('sglang'), sorted(e.name for e in "
        "m.entry_points(group='sglang.srt.plugins') if e.dist.name == 'sglang'))"
    )
    done = ran(
        sys.executable,
        "-c",
        script,
        env=Overlay("9.9.9", tmp_path).environment(os.environ),
        check=True,
    )
    assert done.stdout.split(maxsplit=1) == ["9.9.9", "['other']\n"]


@pytest.mark.parametrize("text", ["latest", "0.5.x", "../etc", ""])
def test_what_is_no_version_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="is no version of SGLang; name one"):
        overlay.checked_version(text)
