"""``stat`` counts what is stored and says who uses it. Looking changes nothing, and commands no
terminal."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.commands import Cli
from kit.runs import NAMESPACE, OTHER_NAMESPACE, make_run
from kit.stores import REGION, SIZES, digest, keep, keep_again, open_engine
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.region.device import FileReader
from sglang_tiered.storage.region.directory import STORE_VERSION, prepare, shard_path
from sglang_tiered.storage.region.format import (
    ERASED_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    PAGE_SIZES_NAME,
    region_name,
)
from sglang_tiered.storage.region.notes import PageSize, with_page_size
from sglang_tiered.tools.store.scan import ScannedRegion, ShardReader, find_holder

PAYLOAD = 12_288 + 12_000 + 9_000


def stat(cli: Cli, path: Path) -> tuple[int, dict[str, Any]]:
    outcome = cli("stat", path, "--json")
    return outcome.code, json.loads(outcome.out)


def test_the_figures_are_those_of_the_store(cli: Cli, tier: Path, shard: Path) -> None:
    keep(open_engine(shard, namespace=OTHER_NAMESPACE), make_run(7, [5000, 5000]))
    code, report = stat(cli, tier)
    total = report["total"]
    assert (code, report["ok"], report["format_version"]) == (0, True, STORE_VERSION)
    assert (total["regions"], total["sealed_regions"], total["damaged_regions"]) == (4, 4, 0)
    assert (total["pages"], total["superseded_pages"]) == (11, 0)
    assert (total["payload_bytes"], total["physical_bytes"]) == (3 * PAYLOAD + 10_000, 4 * REGION)
    untold = {"tokens": None, "ratio": None}
    assert total["namespaces"] == [
        {"namespace": "11" * 32, "pages": 9, "payload_bytes": 3 * PAYLOAD} | untold,
        {"namespace": "22" * 32, "pages": 2, "payload_bytes": 10_000} | untold,
    ]


def test_tokens_of_ranks_count_once(cli: Cli, tmp_path: Path) -> None:
    """And a codec's ratio, by what the servers noted of their pages."""
    prepare(tmp_path)
    for rank, num_runs in enumerate((1, 2)):
        engine = open_engine(shard_path(tmp_path, f"tp{rank}of2-pp0of1-dp0-0"))
        size = PageSize(64, SIZES[0], 1, ())
        engine.write_note(PAGE_SIZES_NAME, with_page_size(b"", NAMESPACE, size))
        keep(engine, *(make_run(seed, SIZES) for seed in range(num_runs)))
    _, report = stat(cli, tmp_path)
    assert [shard["tokens"] for shard in report["shards"]] == [3 * 64, 6 * 64]
    (namespace,) = report["total"]["namespaces"]
    assert report["total"]["tokens"] == namespace["tokens"] == 6 * 64
    assert namespace["ratio"] == 3 * SIZES[0] / sum(SIZES)


@pytest.mark.parametrize("others", [(), None], ids=["told", "untold"])
def test_copies_and_erased_pages_are_no_tokens(
    cli: Cli, shard: Path, others: tuple[int, ...] | None
) -> None:
    engine = open_engine(shard)
    size = PageSize(64, SIZES[0], 1, others)
    engine.write_note(PAGE_SIZES_NAME, with_page_size(b"", NAMESPACE, size))
    assert engine.erase(Erasure.of(make_run(0, SIZES).keys[:1])).result(20.0)
    engine.close()
    keep_again(open_engine(shard), 1)
    keep(open_engine(shard, namespace=OTHER_NAMESPACE), make_run(2, SIZES))  # other pages
    total = stat(cli, shard)[1]["total"]
    assert (total["pages"], total["superseded_pages"], total["purged_pages"]) == (15, 3, 1)
    ours = total["namespaces"][0]
    assert ours["tokens"] == (8 * 64 if others == () else None)
    assert (ours["ratio"] is None) is (others is None)


@pytest.mark.parametrize("command", ["stat", "verify"])
def test_one_regions_pages_are_held(
    cli: Cli, tier: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Those of a full disk together were gigabytes."""
    views, most, real = weakref.WeakSet[ScannedRegion](), 0, ShardReader.views

    def watched(self: ShardReader, **how: Any) -> Iterator[ScannedRegion]:
        nonlocal most
        for view in real(self, **how):
            views.add(view)
            most = max(most, len(views))
            yield view

    monkeypatch.setattr(ShardReader, "views", watched)
    gc.disable()
    try:
        assert cli(command, tier).code == 0
    finally:
        gc.enable()
    assert most == 2, "the last one, and the next"


def test_equal_inode_of_another_disk_is_no_holder(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fresh disks give their locks the same number, and only one may be in use."""
    lock = (shard / LOCK_NAME).stat()
    locks = tmp_path / "locks"
    monkeypatch.setattr("sglang_tiered.tools.store.scan._LOCKS", locks)
    for device, held in ((lock.st_dev, True), (lock.st_dev ^ 1, False)):
        place = f"{os.major(device):02x}:{os.minor(device):02x}:{lock.st_ino}"
        locks.write_text(f"1: FLOCK  ADVISORY  WRITE 77 {place} 0 EOF\n")
        assert find_holder(shard).held is held


def test_lock_of_a_live_process_is_told(shard: Path) -> None:
    with (shard / LOCK_NAME).open() as lock:
        assert find_holder(shard).held is False
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert str(find_holder(shard)) == f"in use by process {os.getpid()}"


@pytest.mark.parametrize("command", ["stat", "verify"])
def test_an_erase_log_unread_is_one_sentence(
    cli: Cli, tier: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A disk that fails must not look like a purge of everything."""
    real = FileReader.read_file

    def read(self: FileReader, name: str) -> bytes:
        if name == ERASED_NAME:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, name)

    monkeypatch.setattr(FileReader, "read_file", read)
    assert "which says what was erased, cannot be read" in cli(command, tier).refusal


# ---- Every command ----


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
