"""Reads of a directory: what memory holds straight to its pages, the rest by way of other memory,
because a disk or a network may take longer than a load's deadline."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kit.runs import NAMESPACE, blank, make_run, page_data
from kit.tiers import load, store
from kit.waiting import TIMEOUT_S, finished
from sglang_tiered.storage.base import Reason, Run
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.bucket.collect import Collector
from sglang_tiered.storage.bucket.directory import STAGED
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
    Collector(requests, ttl_s=1.0).run_once(NAMESPACE)
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
