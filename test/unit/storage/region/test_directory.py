"""What may be used as a tier directory, and what is left alone."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from sglang_tiered.errors import StoreError, StoreForeignError, StoreFormatError
from sglang_tiered.storage.region import directory as directory_module
from sglang_tiered.storage.region import format as region_format
from sglang_tiered.storage.region.directory import (
    DirectoryState,
    inspect,
    prepare,
    refuse_strangers,
    remove_shards,
    shard_path,
)
from sglang_tiered.storage.region.files import (
    CHECKPOINT_NAME,
    ERASED_NAME,
    LEFTOVER_NAMES,
    LOCK_NAME,
    MANIFEST_NAME,
    NOTE_NAMES,
)
from sglang_tiered.storage.region.format import RegionHeader, pack_region_header, region_name

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "store"
    assert prepare(path) is DirectoryState.ABSENT
    return path


def plant_region(path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_path(path, "0")
    shard.mkdir()
    monkeypatch.setattr(region_format, "FORMAT_VERSION", version)
    block = pack_region_header(RegionHeader(1 << 16, 0, b"n" * 16, 0))
    monkeypatch.undo()
    (shard / region_name(0)).write_bytes(block)


def test_absent_then_ours(store: Path) -> None:
    assert inspect(store) is DirectoryState.OURS
    assert prepare(store) is DirectoryState.OURS
    assert store.stat().st_mode & 0o777 == 0o700
    assert (store / MANIFEST_NAME).stat().st_mode & 0o777 == 0o600
    assert (store / MANIFEST_NAME).read_bytes().startswith(b"sglang-tiered store 4 ")
    assert [file.name for file in store.iterdir()] == [MANIFEST_NAME]


def test_inspecting_touches_nothing(tmp_path: Path) -> None:
    assert inspect(tmp_path / "absent") is DirectoryState.ABSENT
    assert not (tmp_path / "absent").exists()
    assert inspect(tmp_path) is DirectoryState.EMPTY
    assert list(tmp_path.iterdir()) == []


def test_fresh_filesystem_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert inspect(tmp_path) is DirectoryState.EMPTY


def test_somebody_elses_directory_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    for check in (inspect, prepare):
        with pytest.raises(StoreForeignError, match=r"'thesis.tex'.*another --tier-dir"):
            check(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("position", [0, 20, 25, -1])
def test_damaged_manifest_is_repaired(store: Path, position: int) -> None:
    good = (store / MANIFEST_NAME).read_bytes()
    damaged = bytearray(good)
    damaged[position] ^= 1
    (store / MANIFEST_NAME).write_bytes(damaged)
    shard_path(store, "tp0").mkdir()
    assert inspect(store) is DirectoryState.OURS_DAMAGED
    prepare(store)
    assert (store / MANIFEST_NAME).read_bytes() == good
    assert inspect(store) is DirectoryState.OURS


def fill_shard(path: Path) -> Path:
    """A shard with a file under every known name."""
    shard = shard_path(path, "tp0")
    shard.mkdir()
    names = {LOCK_NAME, CHECKPOINT_NAME, ERASED_NAME, *NOTE_NAMES, *LEFTOVER_NAMES, region_name(7)}
    for name in names:
        (shard / name).write_bytes(b"x")
    return shard


def test_known_files_do_not_block_manifest_repair(store: Path) -> None:
    fill_shard(store)
    (store / MANIFEST_NAME).write_bytes(b"")
    assert prepare(store) is DirectoryState.OURS_DAMAGED
    assert inspect(store) is DirectoryState.OURS


def test_no_half_of_a_shard_is_left_behind(store: Path) -> None:
    shard = fill_shard(store)
    assert remove_shards(store, keep=lambda name: False) == ["tp0"]
    assert not shard.exists()


def test_missing_manifest_with_our_regions_is_repaired(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_region(store, 1, monkeypatch)
    (store / MANIFEST_NAME).unlink()
    assert prepare(store) is DirectoryState.OURS_DAMAGED
    assert inspect(store) is DirectoryState.OURS


def test_damaged_manifest_among_foreign_files_is_refused(store: Path) -> None:
    (store / MANIFEST_NAME).write_bytes(b"")
    (store / "notes").write_text("mine")
    with pytest.raises(StoreForeignError, match="notes"):
        inspect(store)


def test_a_foreign_shard_file_without_manifest_is_refused(store: Path) -> None:
    (store / MANIFEST_NAME).unlink()
    shard_path(store, "0").mkdir()
    (shard_path(store, "0") / "photo.jpg").write_text("x")
    with pytest.raises(StoreForeignError, match=r"photo\.jpg"):
        inspect(store)


def test_newer_manifest_is_refused_unchanged(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "STORE_VERSION", 5)
    prepare(store)
    monkeypatch.undo()
    before = (store / MANIFEST_NAME).read_bytes()
    for check in (inspect, prepare):
        with pytest.raises(StoreFormatError, match="format 5, newer than 4"):
            check(store)
    assert (store / MANIFEST_NAME).read_bytes() == before


def test_a_newer_region_without_manifest_is_refused(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_region(store, 4, monkeypatch)
    (store / MANIFEST_NAME).unlink()
    with pytest.raises(StoreFormatError, match="format 4, newer than 3"):
        inspect(store)


@pytest.mark.parametrize("kind", ["file", "link to file", "dangling link"])
def test_not_a_directory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "path"
    if kind == "file":
        path.write_text("x")
    else:
        path.symlink_to(tmp_path / "target")
        if kind == "link to file":
            (tmp_path / "target").write_text("x")
    for check in (inspect, prepare):
        with pytest.raises(StoreForeignError, match="is not a directory"):
            check(path)


def test_fifo_under_our_name_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST_NAME)
    with pytest.raises(StoreForeignError, match=MANIFEST_NAME):
        inspect(tmp_path)


def fail_manifest(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(path: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(directory_module, "_write_manifest", fail)


def test_unwritable_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_manifest(monkeypatch, errno.EROFS)
    with pytest.raises(StoreError, match=r"is not writable \(Read-only file system\); fix its"):
        prepare(tmp_path)


def test_a_full_disk_still_opens_a_good_store(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_manifest(monkeypatch, errno.ENOSPC)
    assert prepare(store) is DirectoryState.OURS


@pytest.mark.parametrize(("times", "opens"), [(2, True), (3, False)])
def test_an_unread_manifest_is_not_missing(
    store: Path, monkeypatch: pytest.MonkeyPatch, times: int, opens: bool
) -> None:
    """It may be of a newer version; a read that fails is tried again, and then refuses."""
    real, left = os.read, [times]

    def read(fd: int, nbytes: int) -> bytes:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, nbytes)

    monkeypatch.setattr(directory_module.os, "read", read)
    if opens:
        assert inspect(store) is DirectoryState.OURS
    else:
        with pytest.raises(StoreError, match=r"cannot be read \(Input/output error\)"):
            inspect(store)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b"])
def test_shard_names_that_cannot_be_told_again(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a shard"):
        shard_path(tmp_path, name)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_world_writable_directory_is_refused_untouched(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(StoreError, match=r"written by everybody .*chmod o-w it, or pass"):
        refuse_strangers(tmp_path)
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o770)
    refuse_strangers(tmp_path)
    refuse_strangers(tmp_path / "absent")
