"""Looking changes nothing, and commands no terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kit.commands import Cli
from kit.runs import make_run
from kit.stores import SIZES, digest
from sglang_tiered.storage.region.format import MANIFEST_NAME, region_name


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


@pytest.mark.parametrize("command", ["stat", "verify", "dump"])
@pytest.mark.parametrize("name", ["thesis.tex", MANIFEST_NAME], ids=["foreign", "FIFO"])
def test_a_directory_without_store_is_refused_untouched(
    cli: Cli, tmp_path: Path, command: str, name: str
) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "directory" / name)
    before = digest(tmp_path)
    assert (
        f"holds {name!r}, not a tier store's file" in cli(command, tmp_path / "directory").refusal
    )
    assert digest(tmp_path) == before


def test_names_that_would_command_a_terminal_are_escaped(cli: Cli, tier: Path, shard: Path) -> None:
    os.mkfifo(shard / region_name(9))
    evil = tier.rename(tier.parent / "\x1b[2J\udcff")
    for command in ("stat", "verify"):
        outcome = cli(command, evil)
        assert "\x1b" not in outcome.out + outcome.err
        assert json.loads(cli(command, evil, "--json").out)
