"""The command line: help, one sentence for what cannot work, and each command as a process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.commands import Cli
from kit.runs import make_run
from kit.stores import SIZES, digest
from sglang_tiered.storage.region import directory as directory_module
from sglang_tiered.storage.region.directory import prepare
from sglang_tiered.storage.region.files import MANIFEST_NAME
from sglang_tiered.storage.region.format import region_name

COMMANDS = ("stat", "verify", "dump")


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


def test_names_that_would_command_a_terminal_are_escaped(cli: Cli, tier: Path, shard: Path) -> None:
    os.mkfifo(shard / region_name(9))
    evil = tier.rename(tier.parent / "\x1b[2J\udcff")
    for command in ("stat", "verify"):
        outcome = cli(command, evil)
        assert "\x1b" not in outcome.out + outcome.err
        assert json.loads(cli(command, evil, "--json").out)
