"""Lines are whole or absent, counted if absent, bounded, and never waited for."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from kit.waiting import eventually
from sglang_tiered.integration.observe import story
from sglang_tiered.integration.observe.story import CLOSE_S, LineWriter
from sglang_tiered.request_log import open_log

LARGE = 1 << 30


def ended(rid: str) -> story.Story:
    """A request that arrived at 10 s of its server's clock, with a prompt of 100 tokens."""
    made = story.Story.begins(10.0)
    made.line.rid, made.line.end, made.line.total_s = rid, "stop", 12.5
    made.line.admitted_s, made.line.num_prompt_tokens = 10.5, 100
    return made


def rids(path: Path) -> list[str]:
    return [json.loads(line)["rid"] for line in path.read_bytes().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def test_requests_are_lines_in_their_order(path: Path) -> None:
    writer = LineWriter(path, max_bytes=LARGE, replica=3)
    for number in range(1000):
        writer.put(ended(f"r{number}"))
    writer.close()
    assert rids(path) == [f"r{number}" for number in range(1000)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = json.loads(path.read_bytes().splitlines()[0])
    assert (first["v"], first["replica"], first["tokens"]) == (1, 3, {"num_computed": 100})


def test_scheduler_waits_for_no_hung_disk(path: Path) -> None:
    answers, has_begun = threading.Event(), threading.Event()

    def hang(descriptor: int, data: bytes) -> int:
        has_begun.set()
        assert answers.wait(60)
        return os.write(descriptor, data)

    writer = LineWriter(path, max_bytes=LARGE, max_queued=10, write=hang)
    writer.put(ended("first"))
    assert has_begun.wait(60)
    began = time.monotonic()
    for number in range(1000):
        writer.put(ended(f"r{number}"))
    assert time.monotonic() - began < CLOSE_S
    assert writer.num_dropped == 990
    answers.set()
    writer.close()
    assert rids(path) == ["first", *(f"r{number}" for number in range(10))]


def test_two_files_are_all_there_is(path: Path) -> None:
    writer = LineWriter(path, max_bytes=2048)
    for number in range(100):
        writer.put(ended(f"r{number}"))
        eventually(writer._queue.empty, "written")
    writer.close()
    older = path.with_name("requests.jsonl.1")
    assert sorted(os.listdir(path.parent)) == [path.name, older.name]
    assert 0 < path.stat().st_size <= 2048 and 0 < older.stat().st_size <= 2048
    kept = rids(older) + rids(path)
    assert kept == [f"r{number}" for number in range(100 - len(kept), 100)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and writer.num_dropped == 0


def test_full_disk_leaves_no_half_line(path: Path) -> None:
    """It takes a part of what would outgrow it, refuses the rest, and has room again one day."""
    is_full = True

    def write(descriptor: int, data: bytes) -> int:
        room = 2000 - os.fstat(descriptor).st_size if is_full else len(data)
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, data[:room])

    writer = LineWriter(path, max_bytes=LARGE, write=write)

    def num_told() -> int:
        return writer.num_dropped + (path.read_bytes().count(b"\n") if path.exists() else 0)

    for number in range(20):
        writer.put(ended(f"r{number}"))
        eventually(lambda number=number: num_told() == number + 1)
    kept = rids(path)
    assert kept == [f"r{number}" for number in range(len(kept))] and 0 < len(kept) < 20
    is_full = False
    writer.put(ended("after"))
    writer.close()
    assert rids(path) == [*kept, "after"] and writer.num_dropped == 20 - len(kept)


@pytest.mark.parametrize("how", ["moved", "deleted", "killed"])
def test_next_line_is_there_and_whole(path: Path, how: str) -> None:
    """Whoever took the file, and where a killed server left a line half."""
    writer = LineWriter(path, max_bytes=LARGE)
    writer.put(ended("before"))
    eventually(lambda: path.exists() and path.stat().st_size, "written")
    if how == "moved":
        path.rename(path.with_name("elsewhere"))
    elif how == "deleted":
        path.unlink()
    else:
        writer.close()
        with path.open("ab") as file:
            file.write(b'{"v":1,"rid":"half')
        writer = LineWriter(path, max_bytes=LARGE)
    writer.put(ended("after"))
    writer.close()
    assert json.loads(path.read_bytes().splitlines()[-1])["rid"] == "after"


def test_name_that_became_a_pipe_hangs_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_and_lose(path: Path) -> int:
        descriptor = open_log(path)
        path.unlink()
        os.mkfifo(path)
        return descriptor

    path.write_bytes(b'{"v":1,"rid":"half')
    monkeypatch.setattr(story, "open_log", open_and_lose)
    writer = LineWriter(path, max_bytes=LARGE)
    writer.put(ended("r"))
    writer.close()
    assert not writer._thread.is_alive()
    writer = LineWriter(path, max_bytes=LARGE)  # which cannot open it
    writer.put(ended("s"))
    writer.close()
    assert writer.num_dropped == 1
