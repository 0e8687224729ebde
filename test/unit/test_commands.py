"""``sglang-tiered`` lists the commands that there are, and says its versions."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import sglang_tiered
import sglang_tiered_lab
from kit.commands import ran
from sglang_tiered.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGES = [Path(package.__file__).parent for package in (sglang_tiered, sglang_tiered_lab)]


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
    ended = ran(sys.executable, "-m", "sglang_tiered")
    assert (ended.returncode, ended.stderr) == (0, "")
    shown = [line.split()[:2] for line in ended.stdout.splitlines()]
    assert shown[: len(COMMANDS)] == [["sglang-tiered", name] for name in COMMANDS]


def test_version_says_what_a_bug_report_needs() -> None:
    ended = ran(sys.executable, "-m", "sglang_tiered", "--version")
    assert (ended.returncode, ended.stderr) == (0, "")
    told = [line.split()[:2] for line in ended.stdout.splitlines()]
    assert told[0] == ["sglang-tiered", sglang_tiered.__version__]
    assert [name for name, _ in told[1:4]] == ["sglang", "torch", "Python"]


def test_list_of_servers_is_not_overwritten(tmp_path: Path) -> None:
    """Of ``scripts/serve-cluster``; that its port is in use, it says later."""
    mine = tmp_path / "servers.txt"
    mine.write_text("http://a:1\n")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = f"--port={busy.getsockname()[1]}"
        ended = ran(ROOT / "scripts/serve-cluster", port, "--list", mine)
    assert ended.returncode == 2 and f"--list {mine} is there already" in ended.stderr
    assert mine.read_text() == "http://a:1\n"
