"""The rules of the contract of tiers, and the tests that hold them."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_tiered.storage import base

FOLDERS = ("contract", "fault")


def test_every_rule_names_a_test_that_exists() -> None:
    rules = re.split(r"\n\d+\. ", base.__doc__ or "")[1:]
    root = Path(__file__).parents[1]
    tests = "".join(path.read_text() for each in FOLDERS for path in (root / each).glob("*.py"))
    assert len(rules) == 9
    for rule in rules:
        names = re.findall(r"``(test_\w+)``", rule)
        assert names, rule
        assert all(f"def {name}(" in tests for name in names), names
