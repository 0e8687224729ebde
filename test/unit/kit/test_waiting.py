"""Waiting ends when the condition holds, and fails when it never does."""

from __future__ import annotations

import pytest

from kit.waiting import eventually


def test_a_condition_is_asked_until_it_holds() -> None:
    answers = [True, False, False]
    eventually(answers.pop)
    assert answers == []


def test_a_condition_that_never_holds_fails() -> None:
    with pytest.raises(AssertionError, match=r"within 0 s: rain"):
        eventually(lambda: False, "rain", timeout_s=0.02)
