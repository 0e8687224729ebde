"""Records cross processes whole, however a writer ends, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from kit.cost_records import record_of
from sglang_tiered.integration.admin import cost_board
from sglang_tiered.integration.admin.cost_board import ENVIRONMENT_VARIABLE, CostBoard
from sglang_tiered.policy.cost_model import CostModel

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_tiered.policy.server_costs import RankCosts

MODEL = CostModel(page_tokens=64, bytes_per_token=1000)


def record(rank: int = 0, *, at: float = 0.0, server: str = "") -> RankCosts:
    return record_of(MODEL, rank=rank, at=at, server=server)


CHILD = """
import sys
import msgspec
from sglang_tiered.integration.admin.cost_board import CostBoard
from sglang_tiered.policy.server_costs import RankCosts
board = CostBoard.from_environment()
record = msgspec.json.decode(sys.argv[1], type=RankCosts)
board.write(msgspec.structs.replace(record, boot=board.boot), 100.0)
"""


def test_record_of_another_process_has_an_age() -> None:
    with CostBoard.create(3) as board:
        environment = dict(os.environ)
        board.to_environment(environment)
        assert board.read() == ()
        data = msgspec.json.encode(record(1, at=7.0))
        subprocess.run([sys.executable, "-c", CHILD, data], env=environment, check=True, timeout=60)
        (found,) = board.read(lambda: 102.5)
    assert (found.rank, found.at, found.age_s, found.boot) == (1, 7.0, 2.5, board.boot)


def test_each_rank_has_a_place() -> None:
    with CostBoard.create(2) as board:
        for turn in range(5):
            for rank in (1, 0):
                board.write(record(rank, at=float(turn)), 0.0)
        assert [(found.rank, found.at) for found in board.read()] == [(0, 4.0), (1, 4.0)]
        with pytest.raises(ValueError, match="no place for .* of rank 2: the board has 2 ranks"):
            board.write(record(2), 0.0)
        with pytest.raises(ValueError, match="no place"):
            board.write(record(server="x" * cost_board.PLACE_BYTES), 0.0)


def test_half_a_record_leaves_the_one_before() -> None:
    """As a writer leaves it that is killed meanwhile."""
    with CostBoard.create(1) as board:
        board.write(record(at=1.0), 0.0)
        board.write(record(at=2.0), 0.0)
        start = cost_board._start(0, 0)  # of the second one
        for place in (start, start + 4, start + 200):
            byte = board._memory[place]
            board._memory[place] = byte ^ 1
            assert [found.at for found in board.read()] == [1.0], place
            board._memory[place] = byte
        assert [found.at for found in board.read()] == [2.0]


WRITER = """
import sys
import msgspec
from sglang_tiered.integration.admin.cost_board import CostBoard
from sglang_tiered.policy.server_costs import RankCosts
board = CostBoard.from_environment()
record = msgspec.json.decode(sys.argv[1], type=RankCosts)
records = [
    msgspec.structs.replace(record, server=letter * (3000 + turn))
    for turn, letter in enumerate("abcdefgh")
]
for number in range(10**9):
    board.write(msgspec.structs.replace(records[number % 8], at=float(number)), 0.0)
"""


def test_every_read_beside_a_writer_is_whole() -> None:
    """The writer is another process, which no lock of this interpreter holds up."""
    with CostBoard.create(1) as board:
        environment = dict(os.environ)
        board.to_environment(environment)
        command = [sys.executable, "-c", WRITER, msgspec.json.encode(record())]
        with subprocess.Popen(command, env=environment) as writer:
            try:
                deadline = time.monotonic() + 60.0
                last, num_seen = -1.0, 0
                while num_seen < 5_000:
                    assert time.monotonic() < deadline and writer.poll() is None
                    for found in board.read():
                        number = int(found.at)
                        assert found.server == "abcdefgh"[number % 8] * (3000 + number % 8)
                        assert found.at >= last - 1.0
                        num_seen += found.at > last
                        last = max(last, found.at)
            finally:
                writer.kill()


def test_processes_without_a_board_publish_nothing(tmp_path: Path) -> None:
    assert CostBoard.from_environment({}) is None
    assert CostBoard.from_environment({ENVIRONMENT_VARIABLE: str(tmp_path / "none")}) is None
    other = tmp_path / "other"
    for data in (b"", b"x" * 100, cost_board._HEADER.pack(b"SGLTCOST", 7, bytes(16))):
        other.write_bytes(data)
        assert CostBoard.from_environment({ENVIRONMENT_VARIABLE: str(other)}) is None


def test_closing_gives_the_memory_back() -> None:
    num_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with CostBoard.create(4) as board:
            environment: dict[str, str] = {}
            board.to_environment(environment)
            child = CostBoard.from_environment(environment)
            assert child is not None
            board.close()
            child.write(record(), 0.0)
            assert len(child.read()) == 1
            child.close()
            child.close()
    assert len(os.listdir("/proc/self/fd")) == num_before
