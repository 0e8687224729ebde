"""The command line: help, one sentence for what cannot work, and each command as a process."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.commands import Cli
from kit.runs import make_run
from kit.stores import SIZES, digest
from sglang_tiered.storage.region import directory as directory_module
from sglang_tiered.storage.region.directory import prepare
from sglang_tiered.storage.region.files import MANIFEST_NAME
from sglang_tiered.storage.region.format import region_name

COMMANDS = ("stat", "verify", "dump")


def run_module(
    *arguments: object, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_tiered.tools.store.cli", *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        # Buffered, as for a user: what is left in the buffer may fail when Python ends.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    ["stat", "stat --json", "stat --jobs 3", "verify --jobs 1", "verify --jobs 3", "dump"],
)
def test_looking_changes_nothing(cli: Cli, tier: Path, words: str) -> None:
    before = digest(tier)
    command, *flags = words.split()
    assert cli(command, tier, *flags).code == 0
    if command == "dump":
        key, output = make_run(0, SIZES).keys[0].hex(), tier.parent / "page.bin"
        assert cli("dump", tier, "--extract", key, "--output", output).code == 0
    assert digest(tier) == before


@pytest.mark.parametrize(
    "arguments",
    [(), ("stat",), ("verifi", "/"), ("stat", "/", "--deleet"), ("stat", "/", "--jobs", "x")],
)
def test_an_impossible_command_line_is_one_sentence(cli: Cli, arguments: tuple[str, ...]) -> None:
    assert cli(*arguments).refusal.startswith("sglang-tiered: ")


def newer(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory_module, "STORE_VERSION", 77)
        prepare(path)


def foreign_shard(path: Path) -> None:
    (path / "shard-0").mkdir()
    (path / "shard-0" / "thesis.tex").write_text("years")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda _: None, "is empty"),
        (lambda path: (path / "thesis.tex").touch(), "holds 'thesis.tex', not a tier store's file"),
        (newer, "format 77, newer than"),
        (lambda path: os.mkfifo(path / MANIFEST_NAME), "holds 'STORE', not a tier store's file"),
        (foreign_shard, "holds 'thesis.tex', not a tier store's file"),
    ],
)
def test_a_directory_without_store_is_refused_untouched(
    cli: Cli, tmp_path: Path, command: str, make: Callable[[Path], None], what: str
) -> None:
    path = tmp_path / "directory"
    path.mkdir()
    make(path)
    before = digest(path)
    refusal = cli(command, path).refusal
    assert what in refusal
    assert ("--tier-dir of a server" in refusal) == (make is not newer)
    assert digest(path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_no_directory_is_one_sentence(cli: Cli, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for name, what in (
        ("absent", "does not exist"),
        ("file", "is not a directory"),
        ("dangling", "does not exist"),
        ("file/below", "is not a directory"),
        ("x" * 300, "cannot be read (File name too long)"),
    ):
        refusal = cli(command, tmp_path / name).refusal
        assert what in refusal
        assert "--tier-dir of a server" in refusal


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unreadable_directory_is_one_sentence(
    cli: Cli, tier: Path, shard: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the system is made to refuse."""
    original = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if path == shard:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(shard))
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    outcome = cli(command, tier)
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "cannot be read (Permission denied)" in outcome.err


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_tier_and_shard_are_fine(cli: Cli, tmp_path: Path, command: str) -> None:
    prepare(tmp_path / "tier")
    assert cli(command, tmp_path / "tier").code == 0
    (tmp_path / "tier" / "shard-0").mkdir()
    (tmp_path / "tier" / "shard-0" / "LOCK").touch()
    assert cli(command, tmp_path / "tier").code == 0
    assert cli(command, tmp_path / "tier" / "shard-0").code == 0


def test_names_that_would_command_a_terminal_are_escaped(cli: Cli, tier: Path, shard: Path) -> None:
    os.mkfifo(shard / region_name(9))
    evil = tier.rename(tier.parent / "\x1b[2J\udcff")
    for command in ("stat", "verify"):
        outcome = cli(command, evil)
        assert "\x1b" not in outcome.out + outcome.err
        assert json.loads(cli(command, evil, "--json").out)


@pytest.mark.parametrize("command", ["stat", "dump", "--help"])
def test_an_output_nobody_reads_is_no_error(tier: Path, command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = run_module(command, tier, stdout=writing)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("command", ["stat", "dump"])
def test_an_output_that_is_full_is_one_sentence(tier: Path, command: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    result = run_module(command, tier, stdout=full)
    os.close(full)
    assert result.returncode == 2
    assert "No space left on device" in result.stderr
    assert result.stderr.count("\n") == 1
