"""``python -m sglang_tiered`` lists the commands that there are, at once, and starts each."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_tiered
from sglang_tiered.__main__ import _MODULES, COMMANDS

PACKAGE = Path(sglang_tiered.__file__).parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_list_names_exactly_the_runnable_modules() -> None:
    runnable = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__main__")
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^if __name__ == ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert runnable - {"__main__"} == {_MODULES.get(name, name) for name in COMMANDS}
    ended = run("-m", "sglang_tiered")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == run("-m", "sglang_tiered", "--help").stdout
    assert [line.split()[3] for line in ended.stdout.splitlines()] == list(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"launch_server", "explain", "keygen"}))
def test_the_list_names_the_commands_of_a_command(name: str) -> None:
    parser = importlib.import_module(f"sglang_tiered.{_MODULES.get(name, name)}.cli")._parser()
    (below,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    assert COMMANDS[name].partition(": ")[2].split(", ") == list(below.choices)


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


def test_an_unknown_command_is_one_sentence() -> None:
    ended = run("-m", "sglang_tiered", "serve")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "sglang-tiered: serve is no command; python -m sglang_tiered lists what there is.\n"
    )


def test_command_runs_alike_by_name_and_module(tmp_path: Path) -> None:
    arguments = ("stat", str(tmp_path / "absent"))
    by_name = run("-m", "sglang_tiered", "store", *arguments)
    directly = run("-m", "sglang_tiered.tools.store", *arguments)
    assert by_name.returncode == directly.returncode == 2
    assert by_name.stderr == directly.stderr != ""
