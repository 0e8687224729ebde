"""Reads of a directory: what memory holds straight to its pages, the rest by way of other memory,
because a disk or a network may take longer than a load's deadline."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kit.runs import NAMESPACE, blank, make_run, page_data
from kit.tiers import load, store
from kit.waiting import TIMEOUT_S, finished
from sglang_tiered.storage.base import Reason, Run
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.bucket.collect import Collector, CollectorSettings
from sglang_tiered.storage.bucket.directory import STAGED, Directory
from sglang_tiered.storage.bucket.requests import BucketError, Requests

Read = Callable[[int, Sequence[Any], int, int], int]

SIZES = [70_000, (3000, 1, 5000), 4096, 9000, (20_000, 20_000), 12_345]
_preadv = os.preadv


def stored(make_engine: Any, folder: Path, **changes: Any) -> tuple[BucketEngine, Run]:
    """A run in a directory."""
    engine = make_engine(url=folder.as_uri(), **changes)
    run = make_run(1, SIZES)
    store(engine, run)
    return engine, run


def object_of(folder: Path, key: bytes) -> Path:
    (file,) = folder.glob(f"v2/*/pages/*/*-{key.hex()}-*")
    return file


def holds_up_to(num_bytes: int) -> Read:
    """As if memory held no more of any file."""

    def read(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if not flags:
            return _preadv(fd, buffers, offset)
        room = num_bytes - offset
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        held = bytearray(min(room, sum(len(buffer) for buffer in buffers)))
        num_read = _preadv(fd, [held], offset)
        view = memoryview(held)[:num_read]
        for buffer in buffers:
            part, view = view[: len(buffer)], view[len(buffer) :]
            buffer[: len(part)] = part
        return num_read

    return read


def offers_nothing(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
    if flags:
        raise OSError(errno.EOPNOTSUPP, "not on this file system")
    return _preadv(fd, buffers, offset)


@pytest.mark.parametrize(
    "read",
    [holds_up_to(1 << 30), *map(holds_up_to, (0, 1, 70_000, 75_000, 90_000)), offers_nothing],
    ids=["all in memory", "none", "a byte", "a page", "half a page", "most", "cannot tell"],
)
@pytest.mark.parametrize("wanted", [range(6), (0, 2, 5), (1, 3, 4)], ids=["run", "gaps", "later"])
def test_every_page_is_right_however_much_is_cached(
    make_engine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Read,
    wanted: Sequence[int],
) -> None:
    engine, run = stored(make_engine, tmp_path)
    part = Run(tuple(run.keys[i] for i in wanted), tuple(run.pages[i] for i in wanted))
    monkeypatch.setattr(os, "preadv", read)
    for _ in range(2):
        target = blank(part)
        assert finished(engine.submit_load(target)) == [Reason.OK] * len(wanted)
        assert page_data(target) == page_data(part)


def test_no_read_that_waits_fills_the_callers_pages(
    make_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that hangs (a server of a shared directory that went away) past the deadline."""
    engine, run = stored(make_engine, tmp_path)
    reached, opened = threading.Event(), threading.Event()
    hold = holds_up_to(0)

    def hangs(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if not flags:
            reached.set()
            assert opened.wait(TIMEOUT_S)
        return hold(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", hangs)
    target = blank(run)
    job = engine.submit_load(target, deadline_s=0.05)
    assert reached.wait(TIMEOUT_S)
    assert finished(job) == [Reason.IO_ERROR] * run.num_pages
    opened.set()
    again = blank(run)
    assert finished(engine.submit_load(again, deadline_s=TIMEOUT_S)) == [Reason.OK] * run.num_pages
    assert page_data(target) == page_data(blank(run)), "a buffer was touched after its job"


def test_a_file_of_tomorrow_hides_no_later_page(make_engine: Any, tmp_path: Path) -> None:
    """As one that was restored or touched: others list from the newest time on."""
    engine, run = stored(make_engine, tmp_path)
    tomorrow = time.time() + 86_400.0
    os.utime(object_of(tmp_path, run.keys[0]), (tomorrow, tomorrow))
    reader = make_engine(url=tmp_path.as_uri())
    assert reader.refresh(TIMEOUT_S)
    later = make_run(2, [100])
    assert finished(engine.submit_store(later)) == [Reason.OK]
    assert reader.refresh(TIMEOUT_S)
    assert reader.contains(later.keys) == [True]


def test_a_folder_removed_meanwhile_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a server that deleted the last page in it. Others may read what is there."""
    folder, removed = Directory(tmp_path), [True]
    make = os.mkdir

    def then_remove(path: Any, *arguments: Any, **named: Any) -> None:
        make(path, *arguments, **named)
        if removed and path == "1":
            removed.pop()
            os.rmdir(path, **named)

    monkeypatch.setattr(os, "mkdir", then_remove)
    before = os.umask(0o027)
    try:
        folder.write("v2/n/pages/1/a", b"12")
    finally:
        os.umask(before)
    assert not removed
    file = tmp_path / "v2/n/pages/1/a"
    assert file.read_bytes() == b"12"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o640, 0o750)
    for data in (b"12", b"34"):
        folder.write("v2/n/pages/1/a", data)
        assert folder.read("v2/n/pages/1/a", 9) == data
        Directory(tmp_path).remove("v2/n/pages/1/a")
        with pytest.raises(FileNotFoundError):
            folder.read("v2/n/pages/1/a", 9)


def test_a_listing_is_in_order_from_any_path(tmp_path: Path) -> None:
    folder = Directory(tmp_path)
    names = sorted(f"v2/n/pages/{hour}/{second:04d}-x" for hour in range(3) for second in range(9))
    for name in reversed(names):
        folder.write(name, b"12")
    listed = [each for chunk in folder.listing("v2/n/pages", None) for each in chunk]
    assert [each.path for each in listed] == names
    assert {each.size for each in listed} == {2}
    for at in range(len(names)):
        after = [e.path for chunk in folder.listing("v2/n/pages", names[at]) for e in chunk]
        assert after == names[at + 1 :]
    assert [e.path for c in folder.listing("v2/n/pages", "v2/n/pages/1/0004") for e in c] == names[
        13:
    ]
    for name in names:
        folder.remove(name)
    assert folder.folders("v2/n/pages") == [], "empty folders are left"


@pytest.mark.parametrize("kind", ["nothing", "link", "pipe", "folder"])
def test_what_is_no_file_is_a_prompt_miss(make_engine: Any, tmp_path: Path, kind: str) -> None:
    engine, run = stored(make_engine, tmp_path / "bucket")
    file = object_of(tmp_path / "bucket", run.keys[2])
    file.rename(tmp_path / "elsewhere")
    if kind == "link":
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    reasons = load(engine, run)
    assert [reason is Reason.OK for reason in reasons] == [True, True, False, True, True, True]
    assert reasons[2] is Reason.MISS
    assert not engine.contains(run.keys[2:3])[0]
    assert engine.stats().health.value == "running"


@pytest.mark.parametrize("place", ["v2/{ns}", "v2/{own}/pages", "v2/{own}/pins", "v2/erased"])
def test_no_link_leads_out_of_the_directory(tmp_path: Path, place: str) -> None:
    """Who may write there would have a server delete, read or write what is elsewhere."""
    home, bucket = tmp_path / "home", tmp_path / "bucket"
    (home / "docs").mkdir(parents=True)
    for file in (home / f"thesis{STAGED}1", home / "docs" / "keys"):
        file.write_text("mine")
        os.utime(file, (1e9, 1e9))
    link = bucket / place.format(ns="77" * 32, own=NAMESPACE.hex())
    link.parent.mkdir(parents=True)
    link.symlink_to(home)
    requests = Requests(bucket.as_uri())
    Collector(requests, CollectorSettings(ttl_s=1.0)).run_once(NAMESPACE)
    through = str(link.relative_to(bucket))
    for call in (
        lambda: requests.put(f"{through}/docs/new", b"1"),
        lambda: requests.get(f"{through}/docs/keys", 4),
    ):
        with pytest.raises(BucketError):
            call()
    assert requests.modified(f"{through}/docs/keys") is None
    requests.delete([f"{through}/docs/keys"])
    assert len(list(home.rglob("*"))) == 3, "what is elsewhere was touched"
