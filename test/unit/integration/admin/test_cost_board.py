"""Records cross processes whole, however a writer ends, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from sglang_tiered.integration.admin import cost_board
from sglang_tiered.integration.admin.cost_board import ENVIRONMENT_VARIABLE, CostBoard
from sglang_tiered.policy.cost_model import CostModel
from sglang_tiered.policy.server_costs import (
    TIERS,
    DecodeLoad,
    PrefillPrices,
    RankCosts,
    Room,
    TierPrices,
    Waiting,
)

if TYPE_CHECKING:
    from pathlib import Path

MODEL = CostModel(page_tokens=64, bytes_per_token=1000)


def record(rank: int = 0, *, at: float = 0.0, server: str = "") -> RankCosts:
    return RankCosts(
        at=at,
        boot="00" * 16,
        rank=rank,
        role="aggregated",
        bootstrap_port=None,
        namespace="11" * 32,
        server=server,
        page_tokens=64,
        kv_bytes_per_token=1000,
        prefill=PrefillPrices(MODEL.prefill.all_prices, 0),  # type: ignore[arg-type]
        tiers={
            name: TierPrices(cost.prices, 0, healthy=True)  # type: ignore[arg-type]
            for name, cost in zip(TIERS, MODEL.transfers, strict=True)
        },
        always_loads=False,
        keyed=False,
        queue_wait_s=0.0,
        running_prefill_s=0.0,
        busy=0.0,
        ahead_tokens=(0, 0, 0),
        waiting=Waiting(0, 0),
        decode=DecodeLoad(0, 8, (0, 0, 0, 0, 0, 0)),
        device=Room(0, 1),
        host=Room(0, 1),
    )


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


def test_every_read_beside_a_writer_is_whole() -> None:
    with CostBoard.create(1) as board:
        board.write(record(), 0.0)
        ended = threading.Event()

        def write() -> None:
            for number in range(3000):
                board.write(record(at=float(number)), 0.0)
            ended.set()

        writer = threading.Thread(target=write)
        writer.start()
        last, num_read = 0.0, 0
        while not ended.is_set():
            (found,) = board.read()
            assert found.at >= last - 1.0
            last, num_read = max(last, found.at), num_read + 1
        writer.join()
        assert num_read > 10


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
