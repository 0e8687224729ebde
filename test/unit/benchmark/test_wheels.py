"""What a machine lacks is gathered, and nothing that it has."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpu_report import wheels
from gpu_report.wheels import WANTED, Wheel, missing, read_have

MiB = 1 << 20


def test_what_the_machine_has_stays_away() -> None:
    versions = {"transformers": "5.19.0", "numpy": "2.3.5", "regex": "1.0", "torch": "2.14.1"}
    found = [Wheel(name, version, ()) for name, version in versions.items()]
    requiring = [
        Wheel("sglang", "0.5.23", ("transformers==5.19.0", "numpy", "torch==2.14.1")),
        Wheel("transformers", "5.19.0", ("numpy>=1.26", 'regex<0; python_version < "3.12"')),
    ]
    have = read_have("torch==2.11.0+cu130\ntransformers==5.17.0\nNumPy==2.5.2\nRegex==2.0\n")
    lacking = missing(found, have, requiring)
    assert [wheel.name for wheel in lacking] == ["transformers"]  # torch is that machine's own


def test_a_whole_set_is_listed_with_its_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pip's answers replaced: a report for each question, and files of some sizes."""
    asked: list[list[str]] = []

    def metadata(name: str, version: str, *requires: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "version": version, "requires_dist": list(requires)}}

    torch = [metadata("torch", "2.11.0", "sympy"), metadata("sympy", "1.14.0")]

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        if "download" in command:
            folder = Path(command[command.index("--dest") + 1])
            for requirement in (word for word in command if "==" in word):
                name, _, version = requirement.partition("==")
                file = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
                file.write_bytes(b"0" * (2 * MiB if name == "sglang" else MiB))
            return subprocess.CompletedProcess(command, 0, "")
        if "--no-deps" in command:
            found = [metadata("sglang", "0.5.23", "pyzmq>=25", "sglang-kernel==0.4.10")]
        elif set(WANTED) <= set(command):
            found = [metadata("pyzmq", "27.3.0", "pycparser"), metadata("pycparser", "3.12")]
            found += torch
        else:
            found = torch
        return subprocess.CompletedProcess(command, 0, json.dumps({"install": found}))

    monkeypatch.setattr(subprocess, "run", run)
    told = wheels.gather(tmp_path, {})
    assert all("3.12" in command and ":all:" in command for command in asked)
    assert re.search(r"pyzmq 27\.3\.0: messages", told)
    assert re.search(r"pycparser 3\.12: for pyzmq", told)
    assert "3 wheels, 4.0 MiB" in told and "sglang-kernel" not in told and "sympy" not in told
    assert len(list(tmp_path.glob("*.whl"))) == 3


def test_everything_gathered_has_a_pin() -> None:
    """An unpinned one would be whatever is newest on the day."""
    assert set(WANTED) <= wheels._pins().keys()
