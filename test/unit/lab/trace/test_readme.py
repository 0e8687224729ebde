"""The page on traces, and the help, name what there is."""

from __future__ import annotations

import re
from pathlib import Path

from kit.talks import make_request
from sglang_tiered_lab.trace import cli, stat
from sglang_tiered_lab.trace.figures import describe
from sglang_tiered_lab.trace.forms import Format

README = (Path(cli.__file__).parent / "README.md").read_text()


def first_cells(header: str) -> list[str]:
    """The words in backquotes in the first column of the table whose header begins so."""
    lines = iter(README.splitlines())
    next(line for line in lines if line.startswith(f"| {header} |"))
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found += re.findall(r"`(\w+)`", line.split("|")[1])
    return found


def test_every_format_has_a_row() -> None:
    assert sorted(first_cells("format")) == sorted(known.value for known in Format)


def test_help_of_stat_defines_every_figure() -> None:
    plain = {"num_requests", "duration_s", "rate_per_s", "block_tokens", "input_tokens"}
    plain |= {"output_tokens", "num_blocks"}
    figures = describe([make_request((1, 2))]).keys() - plain
    assert {name for name in figures if name not in stat._DESCRIPTION} == set()
    named = set(re.findall(r"\b[a-z]+_[a-z_]+\b", stat._DESCRIPTION))
    assert named <= figures
