"""Nothing in the repository names the machine or the network it was written on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kit.kept_files import ROOT, kept_files

# Each is written so that it does not match its own text.
HAZARDS = {
    "a home directory": re.compile(r"(?<![\w.}$])/(?:root|(?:home|Users)/[a-z_][\w.-]*)/"),
    "a file URL": re.compile(r"file:/[/]"),
    "a package index": re.compile(
        r"https?:/[/]\S*(?:/simple(?![\w-])|[a]rtifactory|[d]evpi|[n]exus/)"
        r"|(?:--(?:extra-)?index-url|--find-links|--trusted-host)[ =]\S"
    ),
    "a private address": re.compile(
        r"(?<![\d.])(?:10\.\d+|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d+\.\d+(?![\d.])"
    ),
    "a credential": re.compile(r"https?:/[/][^\s/@\"']+:[^\s/@\"']+@|\bhf_[A-Za-z0-9]{30}"),
}


def hazards(text: str) -> list[str]:
    return [f"{name}: {m[0]!r}" for name, p in HAZARDS.items() for m in [p.search(text)] if m]


def test_no_file_names_a_machine_or_a_registry() -> None:
    here = {str(path) for path in (ROOT, Path.home()) if len(path.parts) > 2}  # not just /src
    own = re.compile("|".join(rf"{re.escape(path)}(?![\w.-])" for path in here) or r"(?!)")
    found = []
    for path in filter(Path.is_file, kept_files()):
        text = path.read_bytes().decode("utf-8", errors="replace")
        lines = hazards(text) + [f"this checkout's own path: {m[0]!r}" for m in own.finditer(text)]
        found += [f"{path.relative_to(ROOT)}: {line}" for line in lines]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "parts",
    [
        ("/ro", "ot/models"),
        ("see /ho", "me/alice/x"),
        ("file", ":///opt/index"),
        ("pip install --ind", "ex-url https://host/path"),
        ("https://mirror.example/", "simple/torch"),
        ("http://10.", "1.2.3:8080"),
        ("https://user:", "secret@host"),
    ],
)
def test_a_path_or_an_index_is_caught(parts: tuple[str, str]) -> None:
    assert hazards("".join(parts))
