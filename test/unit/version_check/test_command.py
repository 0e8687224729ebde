"""A version passes if nothing differs and every test that ran passed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest

from version_check import command, smoke
from version_check.command import Check
from version_check.overlay import Overlay, Unmet
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
