"""What may be used as a tier directory, by one holder at a time, and what is left alone; and how
many files may be open in it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.stores import REGION, plant_region
from kit.tiers import open_region
from sglang_tiered.errors import (
    StoreError,
    StoreForeignError,
    StoreFormatError,
    StoreLockedError,
)
from sglang_tiered.storage.region import directory as directory_module
from sglang_tiered.storage.region.directory import (
    DirectoryLock,
    DirectoryState,
    inspect,
    prepare,
    refuse_strangers,
    remove_shards,
    shard_path,
)
from sglang_tiered.storage.region.format import (
    ERASED_NAME,
    LEFTOVER_NAMES,
    LOCK_NAME,
    MANIFEST_NAME,
    NOTE_NAMES,
    region_name,
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "store"
    assert prepare(path) is DirectoryState.ABSENT
    return path


def digest(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_inspecting_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store"
    assert inspect(path) is DirectoryState.ABSENT
    assert not path.exists()
    (path / "lost+found").mkdir(parents=True)  # as a fresh filesystem has
    assert inspect(path) is DirectoryState.EMPTY
    assert digest(path) == {}


def test_absent_then_ours(store: Path) -> None:
    """And a start that died leaves no file."""
    assert inspect(store) is DirectoryState.OURS
    (store / f"{MANIFEST_NAME}.tmp-77").touch()
    (store / "WEIGHTS.tmp-77").touch()
    assert prepare(store) is DirectoryState.OURS
    assert store.stat().st_mode & 0o777 == 0o700
    assert (store / MANIFEST_NAME).stat().st_mode & 0o777 == 0o600
    assert (store / MANIFEST_NAME).read_bytes().startswith(b"sglang-tiered store 4 ")
    assert [file.name for file in store.iterdir()] == [MANIFEST_NAME]


def fill_shard(path: Path) -> Path:
    """A shard with a file under every known name."""
    shard = shard_path(path, "tp0")
    shard.mkdir()
    names = {LOCK_NAME, ERASED_NAME, *NOTE_NAMES, *LEFTOVER_NAMES, region_name(7)}
    for name in names:
        (shard / name).write_bytes(b"x")
    return shard


@pytest.mark.parametrize("position", [0, 20, 25, -1, None])
def test_damaged_manifest_among_our_files_is_repaired(store: Path, position: int | None) -> None:
    good = (store / MANIFEST_NAME).read_bytes()
    if position is None:
        (store / MANIFEST_NAME).unlink()
    else:
        damaged = bytearray(good)
        damaged[position] ^= 1
        (store / MANIFEST_NAME).write_bytes(damaged)
    (store / "shard-0").mkdir()
    plant_region(store / "shard-0", 1)
    shard = fill_shard(store)
    assert inspect(store) is DirectoryState.OURS_DAMAGED
    assert prepare(store) is DirectoryState.OURS_DAMAGED
    assert (store / MANIFEST_NAME).read_bytes() == good
    assert inspect(store) is DirectoryState.OURS
    assert remove_shards(store, keep=lambda name: False) == ["0", "tp0"]
    assert not shard.exists(), "no half of a shard is left behind"


def plant(path: Path, name: str, data: str = "years") -> None:
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(data)


def newer_region(path: Path) -> None:
    shard_path(path, "0").mkdir(parents=True)
    plant_region(shard_path(path, "0"), 4)


def newer_manifest(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory_module, "STORE_VERSION", 5)
        prepare(path)


def fifo(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / MANIFEST_NAME)


def damaged(path: Path) -> None:
    plant(path, MANIFEST_NAME, "")
    plant(path, "thesis.tex")


REFUSALS: dict[str, tuple[Callable[[Path], object], type[StoreError], str]] = {
    "foreign": (lambda p: plant(p, "x.tex"), StoreForeignError, r"'x.tex'.*another --tier-dir"),
    "foreign beside a damaged manifest": (damaged, StoreForeignError, r"'thesis.tex'"),
    "foreign in a shard": (lambda p: plant(p, "shard-0/x.tex"), StoreForeignError, r"x\.tex"),
    "FIFO": (fifo, StoreForeignError, MANIFEST_NAME),
    "newer manifest": (newer_manifest, StoreFormatError, "format 5, newer than 4"),
    "newer region": (newer_region, StoreFormatError, "format 4, newer than 3"),
    "file": (lambda p: p.write_text("x"), StoreForeignError, "is not a directory"),
    "dangling link": (lambda p: p.symlink_to("no"), StoreForeignError, "is not a directory"),
}


@pytest.mark.parametrize(("make", "error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_not_ours_is_refused_untouched(
    tmp_path: Path, make: Callable[[Path], object], error: type[StoreError], message: str
) -> None:
    make(tmp_path / "store")
    before = digest(tmp_path)
    for check in (inspect, prepare):
        with pytest.raises(error, match=message):
            check(tmp_path / "store")
    assert digest(tmp_path) == before


def test_a_full_disk_alone_opens_a_good_store(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = errno.ENOSPC

    def fail(path: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(directory_module, "_write_manifest", fail)
    assert prepare(store) is DirectoryState.OURS
    with pytest.raises(StoreError, match="is not writable"):
        prepare(tmp_path / "new")
    code = errno.EROFS
    with pytest.raises(StoreError, match=r"is not writable \(Read-only file system\); fix its"):
        prepare(store)


@pytest.mark.parametrize(("times", "opens"), [(2, True), (3, False)])
def test_an_unread_manifest_is_not_missing(
    store: Path, monkeypatch: pytest.MonkeyPatch, times: int, opens: bool
) -> None:
    """It may be of a newer version; a read that fails is tried again, and then refuses."""
    real, left = directory_module.read_small_file, [times]

    def read(path: Path, **bounds: int) -> bytes:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, **bounds)

    monkeypatch.setattr(directory_module, "read_small_file", read)
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


@pytest.mark.parametrize("code", [0, errno.ENOSPC, errno.EDQUOT])
def test_second_holder_is_told_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A full disk keeps no lock away, but nobody is named then."""

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    if code:
        monkeypatch.setattr(directory_module.os, "pwrite", refuse)
    with DirectoryLock(tmp_path) as lock:
        assert lock.is_held()
        assert (tmp_path / LOCK_NAME).stat().st_mode & 0o777 == 0o600
        holder = "unknown" if code else os.getpid()
        expected = f"in use by process {holder}; stop it or pass another --tier-dir"
        with pytest.raises(StoreLockedError, match=expected):
            DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


@pytest.mark.parametrize("is_removed", [False, True])
def test_waiting_takes_over_when_the_holder_leaves(tmp_path: Path, is_removed: bool) -> None:
    """Its last holder may remove it: who waited must not lock what nobody else can find."""
    first, naps = DirectoryLock(tmp_path), list[float]()

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            if is_removed:
                (tmp_path / LOCK_NAME).unlink()
            first.release()

    with DirectoryLock(tmp_path, timeout_s=60.0, sleep=nap) as second:
        assert second.is_held() and len(naps) == 3
        with pytest.raises(StoreLockedError):
            DirectoryLock(tmp_path)


def test_a_lock_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "target")
    with pytest.raises(StoreError, match="cannot be opened"):
        DirectoryLock(tmp_path)
    assert (tmp_path / "target").read_text() == "precious"
    with pytest.raises(StoreError, match=r"cannot be opened \(No such file"):
        DirectoryLock(tmp_path / "absent")


def limited(patch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    """A process with ten files open: its limits, the last of which count."""
    limits = [(soft, hard)]
    patch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    patch.setattr(resource, "setrlimit", lambda kind, now: limits.append(now))
    patch.setattr(directory_module, "_num_open", lambda: 10)
    return limits


def test_a_cap_beyond_the_hard_limit_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 1024, 4096)
    with pytest.raises(StoreError, match=r"hold 4000 region files.*ulimit -Hn.* 4096.*raise it"):
        open_region(tmp_path, capacity_bytes=4000 * REGION, region_bytes=REGION)
    # And its lock is free.
    open_region(tmp_path, capacity_bytes=3000 * REGION, region_bytes=REGION).close()


@pytest.mark.parametrize(
    ("num_held", "capacity", "soft"),
    [
        (0, 500, 1024),  # it rises only to the need
        (0, 2000, 2000 + 10 + 512),
        (600, 1000, 600 + 700 + 10 + 512),  # of an earlier run, half the size of those to come
    ],
)
def test_the_soft_limit_rises_to_the_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_held: int, capacity: int, soft: int
) -> None:
    limits = limited(monkeypatch, 1024, 4096)
    for sequence in range(num_held):
        with open(tmp_path / region_name(sequence), "wb") as file:
            file.truncate(REGION // 2)
    directory_module.allow_regions(tmp_path, capacity * REGION, REGION)
    assert limits[-1] == (soft, 4096)
    limited(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    directory_module.allow_regions(tmp_path, 1 << 40, REGION)
    assert directory_module.max_regions() > 1 << 30, "no limit is one"
