"""``sglang-tiered`` lists the commands that there are, at once, and starts each."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_tiered
import sglang_tiered_lab
from kit.commands import ran
from sglang_tiered.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGES = [Path(package.__file__).parent for package in (sglang_tiered, sglang_tiered_lab)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ran(sys.executable, *arguments)


def test_list_names_exactly_the_runnable_modules() -> None:
    runnable = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for package in PACKAGES
        for path in package.rglob("*.py")
        if re.search(r"^if __name__ == ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    listed = {command.module for command in COMMANDS.values()}
    # Itself, and what ``scripts/serve`` and ``scripts/compat`` run.
    unlisted = {"sglang_tiered.__main__", "sglang_tiered.demo.server"}
    unlisted |= {"sglang_tiered.integration.seams"}
    assert runnable - unlisted == listed
    ended = run("-m", "sglang_tiered")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == run("-m", "sglang_tiered", "--help").stdout
    shown = [line.split()[:2] for line in ended.stdout.splitlines()]
    assert shown[: len(COMMANDS)] == [["sglang-tiered", name] for name in COMMANDS]
    assert shown[len(COMMANDS) :] == [["sglang-tiered", "--help"], ["sglang-tiered", "--version"]]


LAB_COMMANDS = ("convert", "scale", "generate")
WITH_COMMANDS = [name for name in COMMANDS if ": " in COMMANDS[name].purpose]


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_the_list_names_the_commands_of_a_command(name: str) -> None:
    parser = importlib.import_module(COMMANDS[name].module).make_parser()
    (below,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    assert COMMANDS[name].purpose.partition(": ")[2].split(", ") == list(below.choices)
    if name in ("store", "trace"):
        assert "exit code" in parser.format_help()
        for command in ("stat", *(("verify", "dump", "gc") if name == "store" else LAB_COMMANDS)):
            told = below.choices[command].format_help()
            assert f"examples:\n  sglang-tiered {name} {command} " in told
            assert max(len(line) for line in told.splitlines()) <= 100


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"serve"}))  # that one takes seconds
def test_usage_names_the_command_as_typed(name: str) -> None:
    ended = run("-m", "sglang_tiered", name, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: sglang-tiered {name} ")


def test_list_imports_only_this_package_and_python() -> None:
    """It is instant, and works where an installation of SGLang does not."""
    code = (
        "import json, runpy, sys\nbefore = {*sys.modules}\nsys.argv = ['-m']\n"
        "try:\n    runpy.run_module('sglang_tiered', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print(json.dumps(sorted({*sys.modules} - before)))"
    )
    loaded = json.loads(run("-c", code).stdout.splitlines()[-1])
    theirs = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
    assert theirs == {"sglang_tiered"}


@pytest.mark.parametrize(
    ("name", "clause"),
    [("stroe", "the nearest is store, and "), ("transfer", ""), ("--versions", "")],
)
def test_an_unknown_command_names_the_nearest(name: str, clause: str) -> None:
    ended = run("-m", "sglang_tiered", name)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"sglang-tiered: {name} is no command; {clause}sglang-tiered --help lists what there is.\n"
    )


def test_version_says_what_a_bug_report_needs() -> None:
    ended = run("-m", "sglang_tiered", "--version")
    assert (ended.returncode, ended.stderr) == (0, "")
    ours, sglang, torch, python, *missing = ended.stdout.splitlines()
    assert ours == f"sglang-tiered {sglang_tiered.__version__}"
    assert sglang.startswith(f"sglang {importlib.metadata.version('sglang')} (required: ")
    assert torch == f"torch {importlib.metadata.version('torch')}"
    assert python.startswith(f"Python {platform.python_version()}, ")
    assert all(line.startswith("missing") for line in missing)


def test_command_runs_alike_by_name_and_module(tmp_path: Path) -> None:
    arguments = ("stat", str(tmp_path / "absent"))
    by_name = run("-m", "sglang_tiered", "store", *arguments)
    directly = run("-m", "sglang_tiered.tools.store.cli", *arguments)
    assert by_name.returncode == directly.returncode == 2
    assert by_name.stderr == directly.stderr != ""


def test_list_of_servers_is_not_overwritten(tmp_path: Path) -> None:
    """Of ``scripts/serve-cluster``; that its port is in use, it says later."""
    mine = tmp_path / "servers.txt"
    mine.write_text("http://a:1\n")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = f"--port={busy.getsockname()[1]}"
        ended = ran(ROOT / "scripts/serve-cluster", port, "--list", mine)
    assert ended.returncode == 2 and f"--list {mine} is there already" in ended.stderr
    assert mine.read_text() == "http://a:1\n"
