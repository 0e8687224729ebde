"""Lines are whole or absent, counted if absent, bounded, and never waited for."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit.ended_request import ended
from kit.waiting import eventually
from sglang_tiered.integration.observe.requests import writer as writer_module
from sglang_tiered.integration.observe.requests.writer import CLOSE_S, LineWriter
from sglang_tiered.request_log import open_log

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
LARGE = 1 << 30


def rids(path: Path) -> list[str]:
    return [json.loads(line)["rid"] for line in path.read_bytes().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def test_requests_are_lines_in_their_order(path: Path) -> None:
    writer = LineWriter(path, max_bytes=LARGE, replica=3)
    for number in range(1000):
        writer.put(*ended(f"r{number}"))
    writer.close()
    assert rids(path) == [f"r{number}" for number in range(1000)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_bytes().splitlines()[0]) == {
        "v": 1,
        "rid": "r0",
        "arrived_unix_s": 1010.0,
        "replica": 3,
        "end": "stop",
        "num_prompt_tokens": 100,
        "num_output_tokens": 7,
        "admitted_s": 0.5,
        "first_token_s": 1.0,
        "total_s": 2.5,
        "tokens": {"num_computed": 100},
    }


def test_scheduler_waits_for_no_hung_disk(path: Path) -> None:
    answers, has_begun = threading.Event(), threading.Event()

    def hang(descriptor: int, data: bytes) -> int:
        has_begun.set()
        assert answers.wait(60)
        return os.write(descriptor, data)

    writer = LineWriter(path, max_bytes=LARGE, max_queued=10, write=hang)
    writer.put(*ended("first"))
    assert has_begun.wait(60)
    began = time.monotonic()
    for number in range(1000):
        writer.put(*ended(f"r{number}"))
    assert time.monotonic() - began < CLOSE_S
    assert writer.num_dropped == 990
    answers.set()
    writer.close()
    assert rids(path) == ["first", *(f"r{number}" for number in range(10))]


class Child:
    """``refusing_disk.py``, as a process."""

    def __init__(self, path: Path, limit: int = 0) -> None:
        folders = filter(None, sys.path)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "refusing_disk.py"), str(path), str(limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        )

    def tell(self, order: str) -> list[str]:
        """Write the line of a request; return what it logged, and what was dropped so far."""
        self.order(order)
        said = []
        while not said or not said[-1].startswith("dropped"):
            line = self.process.stdout.readline()  # type: ignore[union-attr]
            assert line, "the process ended"
            said.append(line.strip())
        return said

    def order(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.process.kill()
        child.process.communicate(timeout=60)


def test_full_disk_leaves_no_half_line(path: Path, children: list[Child]) -> None:
    """The kernel takes a part of what would outgrow its limit, and refuses the rest."""
    child = Child(path, limit=2000)
    children.append(child)
    said = [child.tell(f"r{number}") for number in range(20)]
    told = [line for lines in said for line in lines if not line.startswith("dropped")]
    assert len(told) == 1 and "cannot be written" in told[0] and "are dropped" in told[0]
    kept = rids(path)
    assert kept == [f"r{number}" for number in range(len(kept))]
    assert 0 < len(kept) < 20 and said[-1] == [f"dropped {20 - len(kept)}"]
    child.order("grow")
    assert child.tell("after") == said[-1], "it recovers by itself"
    assert rids(path) == [*kept, "after"]


def test_killed_server_loses_no_line_before(path: Path, children: list[Child]) -> None:
    child = Child(path)
    children.append(child)
    child.tell("before")
    child.process.kill()
    child.process.wait(60)
    with path.open("ab") as file:
        file.write(b'{"v":1,"rid":"half')  # as a kill in the middle of a write leaves it
    writer = LineWriter(path, max_bytes=LARGE)
    writer.put(*ended("next"))
    writer.close()
    first, half, last = path.read_bytes().splitlines()
    assert half == b'{"v":1,"rid":"half'
    assert [json.loads(line)["rid"] for line in (first, last)] == ["before", "next"]


def test_two_files_are_all_there_is(path: Path) -> None:
    writer = LineWriter(path, max_bytes=2048)
    for number in range(100):
        writer.put(*ended(f"r{number}"))
        eventually(writer._queue.empty, "written")
    writer.close()
    older = path.with_name("requests.jsonl.1")
    assert sorted(os.listdir(path.parent)) == [path.name, older.name]
    assert 0 < path.stat().st_size <= 2048 and 0 < older.stat().st_size <= 2048
    kept = rids(older) + rids(path)
    assert kept == [f"r{number}" for number in range(100 - len(kept), 100)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and writer.num_dropped == 0


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_file_that_others_took_is_made_again(path: Path, how: str) -> None:
    writer = LineWriter(path, max_bytes=LARGE)
    writer.put(*ended("before"))
    eventually(lambda: path.exists() and path.stat().st_size, "written")
    if how == "deleted":
        path.unlink()
    else:
        path.rename(path.with_name("elsewhere"))
    if how == "replaced":
        path.touch()
    writer.put(*ended("after"))
    writer.close()
    assert rids(path) == ["after"]


def test_file_that_became_a_link_is_not_followed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = path.with_name("target")
    target.write_bytes(b"")
    path.symlink_to(target)
    with caplog.at_level(logging.WARNING):
        writer = LineWriter(path, max_bytes=LARGE)
        for number in range(3):
            writer.put(*ended(f"r{number}"))
        writer.close()
    assert target.read_bytes() == b"" and writer.num_dropped == 3
    assert len(caplog.records) == 1


def test_name_that_became_a_pipe_hangs_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_and_lose(path: Path) -> int:
        descriptor = open_log(path)
        path.unlink()
        os.mkfifo(path)
        return descriptor

    path.write_bytes(b'{"v":1,"rid":"half')
    monkeypatch.setattr(writer_module, "open_log", open_and_lose)
    writer = LineWriter(path, max_bytes=LARGE)
    writer.put(*ended("r"))
    writer.close()
    assert not writer._thread.is_alive()


def test_line_that_cannot_be_made_costs_itself(path: Path) -> None:
    writer, odd = LineWriter(path, max_bytes=LARGE), Any
    writer.put(ended("odd")[0], odd)
    writer.put(*ended("next"))
    writer.close()
    assert rids(path) == ["next"] and writer.num_dropped == 1
