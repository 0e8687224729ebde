"""Reads of a directory: what memory holds straight to its pages, the rest by way of other memory,
because a disk or a network may take longer than a load's deadline."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from kit.waiting import TIMEOUT_S, finished
from sglang_tiered.storage.base import Reason, Run

if TYPE_CHECKING:
    from pathlib import Path

    from kit.runs import Blank, MakeRun, PageData
    from sglang_tiered.storage.object import ObjectEngine

MakeEngine = Callable[..., "ObjectEngine"]
Read = Callable[[int, Sequence[Any], int, int], int]

SIZES = [70_000, (3000, 1, 5000), 4096, 9000, (20_000, 20_000), 12_345]
_preadv = os.preadv


def stored(make_engine: MakeEngine, make_run: MakeRun, folder: Path) -> tuple[ObjectEngine, Run]:
    """A run in one object of a directory."""
    engine = make_engine(url=folder.as_uri())
    run = make_run(1, SIZES)
    assert set(finished(engine.submit_store(run))) == {Reason.OK}
    return engine, run


def object_of(folder: Path) -> Path:
    (file,) = folder.glob("v1/*/objects/*")
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
    make_engine: MakeEngine,
    make_run: MakeRun,
    blank: Blank,
    page_data: PageData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Read,
    wanted: Sequence[int],
) -> None:
    engine, run = stored(make_engine, make_run, tmp_path)
    part = Run(tuple(run.keys[i] for i in wanted), tuple(run.pages[i] for i in wanted))
    monkeypatch.setattr(os, "preadv", read)
    for _ in range(2):
        target = blank(part)
        assert finished(engine.submit_load(target)) == [Reason.OK] * len(wanted)
        assert page_data(target) == page_data(part)


def test_no_read_that_waits_fills_the_callers_pages(
    make_engine: MakeEngine,
    make_run: MakeRun,
    blank: Blank,
    page_data: PageData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read that hangs (a server of a shared directory that went away) past the deadline."""
    engine, run = stored(make_engine, make_run, tmp_path)
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


def test_a_flipped_bit_costs_its_page_alone(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, tmp_path: Path
) -> None:
    engine, run = stored(make_engine, make_run, tmp_path)
    file = object_of(tmp_path)
    data = bytearray(file.read_bytes())
    data[70_100] ^= 1
    file.write_bytes(data)
    expected = [Reason.OK, Reason.CORRUPT, *[Reason.OK] * 4]
    assert finished(engine.submit_load(blank(run))) == expected
    assert engine.contains(run.keys) == [reason is Reason.OK for reason in expected]


def test_pages_behind_a_files_end_are_corrupt(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, tmp_path: Path
) -> None:
    engine, run = stored(make_engine, make_run, tmp_path)
    os.truncate(object_of(tmp_path), 80_000)
    expected = [Reason.OK, Reason.OK, *[Reason.CORRUPT] * 4]
    assert finished(engine.submit_load(blank(run))) == expected


@pytest.mark.parametrize("kind", ["nothing", "link", "pipe", "folder"])
def test_what_is_no_file_is_a_prompt_miss(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, tmp_path: Path, kind: str
) -> None:
    engine, run = stored(make_engine, make_run, tmp_path / "bucket")
    file = object_of(tmp_path / "bucket")
    file.rename(tmp_path / "elsewhere")
    if kind == "link":
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    assert set(finished(engine.submit_load(blank(run)))) == {Reason.MISS}
    assert not any(engine.contains(run.keys))
    assert engine.stats().health.value == "running"
