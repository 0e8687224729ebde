"""A program that cannot be had costs one search, however many tests need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit import programs


def test_missing_program_is_searched_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each search may wait minutes for a network that is not there."""
    script, searches = tmp_path / "absent-program", tmp_path / "searches"
    script.write_text(f"#!/bin/sh\necho once >>{searches}\necho why >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(programs, "SCRIPTS", tmp_path)
    for _ in range(3):
        with pytest.raises(pytest.skip.Exception, match="why"):
            programs.program("absent-program")
    assert searches.read_text() == "once\n"
