"""Records tell what the scheduler believes, at most so often, and not through its loop."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.layers.dp_attention import compute_dp_attention_world_info
from starlette.requests import Request

from kit.cost_records import record_of
from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode
from sglang_tiered.integration.admin import cost_board, http_api
from sglang_tiered.integration.admin.cost_board import ENVIRONMENT_VARIABLE, CostBoard
from sglang_tiered.integration.admin.costs import (
    CostPublisher,
    num_local_ranks,
    serving_url,
    why_no_costs,
)
from sglang_tiered.policy.cost_model import CostModel
from sglang_tiered.policy.server_costs import ABANDONED, RankCosts, parse_server_costs
from sglang_tiered.storage.base import Tier

NVME = TieredConfig(
    mode=TierMode.NVME,
    nvme=NvmeConfig(directory="/d", capacity_bytes=1 << 30, region_bytes=1 << 22),
)


class Server:
    """A scheduler over the real cache, its board, and a clock that moves when told."""

    def __init__(self, cache: Any, board: CostBoard, **more: Any) -> None:
        self.cache, self.board = cache, board
        self.now = 1000.0
        self.num_used = 0
        stats = SimpleNamespace(get_kv_token_stats=lambda: (self.num_used, 0.0))
        self.scheduler = SimpleNamespace(
            disaggregation_mode=SimpleNamespace(value="null"),
            pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: stats),
            running_batch=SimpleNamespace(reqs=[]),
            waiting_queue=[],
            chunked_req=None,
            max_running_requests=8,
            max_total_num_tokens=4096,
            decode_moment_totals=[0.0] * 6,
            server_args=SimpleNamespace(
                disaggregation_bootstrap_port=8998, num_reserved_decode_tokens=512, device="cpu"
            ),
            **more,
        )
        self.publisher = CostPublisher(
            self.scheduler,
            cache,
            board,
            rank=0,
            clock=lambda: self.now,
            wall_clock=lambda: self.now + 5.0,
        )
        cache.tiering.publish_costs = self.publisher.publish_if_due

    @property
    def role(self) -> str:
        return self.scheduler.disaggregation_mode.value

    def read(self) -> RankCosts:
        (record,) = self.board.read(lambda: self.now)
        return record

    def written_at(self) -> float | None:
        records = self.board.read(lambda: self.now)
        return records[0].at - 5.0 if records else None


@pytest.fixture
def server(cache: Any) -> Iterator[Server]:
    with CostBoard.create(1) as board:
        yield Server(cache, board)


def test_record_tells_what_the_planner_believes(server: Server) -> None:
    planner = server.cache.tiering.planner
    planner.note_batch([(2048, 0)], 0.5, 100)
    planner.costs.transfers[2].observe(1 << 24, 3.0)
    planner.arrives("r", num_held=0, num_new=700, num_before=64, num_ahead=0)
    request = SimpleNamespace(seqlen=900, extend_end=300)
    server.scheduler.waiting_queue, server.scheduler.chunked_req = ["r"], request
    server.scheduler.running_batch.reqs = [SimpleNamespace(), SimpleNamespace()]
    server.num_used = 77
    server.cache.tiering.prefill_begins([(300, 0)], server.now)
    record = server.read()
    costs = planner.costs
    assert record.prefill.prices == costs.prefill.all_prices
    assert record.prefill.observed == 1
    tiers = [record.tiers[tier.value] for tier in Tier]
    assert [tier.prices for tier in tiers] == [cost.prices for cost in costs.transfers]
    assert [tier.observed for tier in tiers] == [cost.num_observed for cost in costs.transfers]
    assert [tier.healthy for tier in tiers] == [True, False, False]
    assert tiers[0].capacity_bytes == server.cache.storage.region_engine.stats().capacity_bytes
    assert tiers[1].capacity_bytes is tiers[1].held_bytes is None
    assert record.namespace == server.cache.storage.namespace.hex() != ""
    assert (record.page_tokens, record.boot) == (server.cache.page_size, server.board.boot)
    assert record.queue_wait_s == planner.queue_wait_s > 0
    assert (record.waiting.requests, record.waiting.tokens) == (1, 700)
    first_s = costs.prefill.prices[0] + costs.prefill.seconds(300, 0)
    rest_s = costs.prefill.seconds(600, 300)
    assert record.running_prefill_s == pytest.approx(first_s + rest_s)
    assert (record.decode.requests, record.decode.tokens) == (2, None)
    assert record.device.held_tokens == 77
    assert record.computes_on == "cpu"
    asked = {"num_held": 256, "num_new": 700, "num_before": 0, "queue_wait_s": 0.1}
    assert record.cost_model().plan(**asked) == costs.plan(**asked)


def test_batch_that_runs_is_in_no_queue(server: Server) -> None:
    """A request that finds nobody waits for its end, and the queue learns that; but the record
    tells what is left of it, and a router adds the two."""
    planner = server.cache.tiering.planner
    planner.note_run(3)
    for name in "abcdefgh":
        planner.arrives(name, num_held=0, num_new=100, num_before=0, num_ahead=0)
        record = planner.loads.get(name)
        planner._queue.admitted(record.place, planner._clock() + 5.0)
        record.place = None
        planner.drop(name)
    planner.arrives("waits", num_held=0, num_new=100, num_before=0, num_ahead=0)
    server.cache.tiering.prefill_begins([(300, 0)], server.now)
    record = server.publisher.take()
    own_s = planner.costs.prefill.seconds(100, 0)
    assert planner.queue_wait_s > 5.0 > record.wait_s()
    assert record.queue_wait_s == pytest.approx(own_s)
    assert record.wait_s() == pytest.approx(own_s + record.running_prefill_s)
    assert record.service_s == pytest.approx(own_s)
    assert record.num_others == 4, "three run, and one waits"


def test_steps_write_no_faster_than_the_interval(server: Server) -> None:
    times = []
    for _ in range(100):
        server.cache.tiering.step()
        times.append(server.written_at())
        server.now += 0.01
    assert len(set(times)) == 20


def test_long_batch_is_told_before_it_runs(server: Server) -> None:
    server.publisher.publish_if_due()
    server.now += 0.001
    server.cache.tiering.prefill_begins([(1, 0)], server.now)
    assert server.written_at() == 1000.0, "a batch of a moment was told"
    server.cache.tiering.prefill_ended(server.now)
    server.cache.tiering.planner.note_batch([(2048, 0)], 60.0)
    server.cache.tiering.prefill_begins([(2048, 0)], server.now)
    assert server.written_at() == server.now
    server.now += 7.0
    record = server.read()
    assert record.age_s == pytest.approx(7.0)
    assert record.running_prefill_s > 30
    assert record.wait_s() == pytest.approx(record.running_prefill_s - 7.0)


def test_scheduler_at_rest_shows_no_work(server: Server) -> None:
    server.scheduler.running_batch.reqs = [SimpleNamespace()]
    server.publisher.publish_if_due()
    server.now += 0.001
    server.publisher.rests()
    assert server.read().decode.requests == 1, "it does not rest while it has work"
    server.scheduler.running_batch.reqs = []
    server.publisher.rests()
    assert server.read().decode.requests == 0
    written_at = server.written_at()
    server.now += 0.001
    server.publisher.rests()
    assert server.written_at() == written_at, "nothing has changed"


def test_detached_tiers_serve_nothing(server: Server) -> None:
    record = server.publisher.take()
    assert record.attached and record.tiers["nvme"].healthy
    server.now += 10.0
    server.cache.cache_controller.storage_backend, held = (
        None,
        server.cache.cache_controller.storage_backend,
    )
    try:
        record = server.publisher.take()
    finally:
        server.cache.cache_controller.storage_backend = held
    assert not any(tier.healthy for tier in record.tiers.values())
    assert record.namespace == "" and not record.attached


@pytest.mark.parametrize(
    ("num_nodes", "tp_size", "attn_dp_size"),
    [(1, 4, 2), (2, 8, 2), (2, 8, 8), (4, 8, 2), (2, 4, 1)],
)
def test_first_machine_counts_the_replicas_that_tell(
    num_nodes: int, tp_size: int, attn_dp_size: int
) -> None:
    settings = SimpleNamespace(
        dp_size=1, attn_dp_size=attn_dp_size, tp_size=tp_size, nnodes=num_nodes
    )
    place = compute_dp_attention_world_info
    here = [place(rank, tp_size, attn_dp_size) for rank in range(tp_size // num_nodes)]
    telling = {dp_rank for attn_tp_rank, _, dp_rank, _ in here if attn_tp_rank == 0}
    assert num_local_ranks(settings) == len(telling)


@pytest.mark.parametrize("lacks", ["decode_moment_totals", "running_batch"])
def test_failed_record_never_stops_the_scheduler(
    server: Server, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.scheduler.running_batch.reqs = [SimpleNamespace()]
    server.publisher.publish_if_due()
    setattr(server.scheduler, lacks, None)
    for _ in range(3):
        server.publisher.rests()
        server.now += 1.0
        server.cache.tiering.step()
        server.cache.tiering.prefill_begins([(100_000, 0)], server.now)
    assert server.written_at() == 1000.0
    assert len([line for line in caplog.messages if "no longer published" in line]) == 1


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_role_decides_what_counts(cache: Any, mode: str) -> None:
    queues = {
        "disagg_prefill_bootstrap_queue": SimpleNamespace(queue=[1]),
        "disagg_decode_prealloc_queue": SimpleNamespace(queue=[1, 2]),
        "disagg_decode_transfer_queue": SimpleNamespace(queue=[1, 2, 3]),
    }
    # Whoever asked each of its requests would take longer with each.
    batch = SimpleNamespace(reqs=[None, None], seq_lens_cpu=torch.tensor([30, 12]))
    with CostBoard.create(1) as board:
        server = Server(cache, board, **queues)
        server.scheduler.disaggregation_mode.value = mode
        server.scheduler.running_batch = batch
        server.num_used = 100
        record = server.publisher.take()
        server.num_used = 35
        shared = server.publisher.take().decode.tokens
        assert shared == (35 + 2 * 512 if mode == "decode" else None), "a prefix is held once"
        batch.seq_lens_cpu = None
        assert server.publisher.take().decode.tokens is None, "lengths are on the device"
        batch.reqs = []
        idle = {"prefill": None, "decode": 0}[mode]
        assert server.publisher.take().decode.tokens == idle
    assert record.role == mode
    assert record.waiting.requests == {"prefill": 1, "decode": 5}[mode]
    assert record.decode.tokens == {"prefill": None, "decode": 42 + 2 * 512}[mode]
    assert record.bootstrap_port == {"prefill": 8998, "decode": None}[mode]


def test_others_hear_of_a_new_role_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(CostPublisher, "_look_at_tiers", lambda *_: told.append(server.role))
    server.publisher.take()
    server.publisher.take()
    assert told == ["null"], "within a second"
    server.scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[])
    server.scheduler.disaggregation_mode.value = "prefill"
    assert server.publisher.take().role == "prefill"
    assert told == ["null", "prefill"]


@pytest.mark.parametrize(
    ("host", "is_tls", "peer", "url"),
    [
        ("192.0.2.1", False, "192.0.2.7", "http://192.0.2.1:1"),
        ("192.0.2.1", True, "192.0.2.7", "https://192.0.2.1:1"),
        ("0.0.0.0", False, "192.0.2.7", "http://192.0.2.7:1"),
        ("::", False, "192.0.2.7", "http://192.0.2.7:1"),
        ("", False, "192.0.2.7", "http://192.0.2.7:1"),
        ("::", False, "[2001:db8::7]", "http://[2001:db8::7]:1"),
        ("2001:db8::1", False, "192.0.2.7", "http://[2001:db8::1]:1"),
        ("kv-3.example", False, "192.0.2.7", "http://kv-3.example:1"),
    ],
)
def test_url_is_one_that_others_reach(host: str, is_tls: bool, peer: str, url: str) -> None:
    assert serving_url(host, 1, is_tls=is_tls, peer_address=f"tcp://{peer}:7001") == url


def ask(
    board: CostBoard,
    config: TieredConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    drains: bool = False,
    abandoned: str = "",
    manager: Any = None,
) -> Any:
    settings = SimpleNamespace(kv_events_config=None, page_size=64)
    settings.disaggregation_bootstrap_port = 8998
    manager = manager or SimpleNamespace(rid_to_state={})
    manager.gracefully_exit, manager.server_args = drains, settings
    manager.disaggregation_mode = DisaggregationMode.PREFILL
    module = ModuleType("sglang.srt.entrypoints.http_server")
    module.get_global_state = lambda: SimpleNamespace(tokenizer_manager=manager)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    request = Request({"type": "http", "headers": [(ABANDONED.encode(), abandoned.encode())]})
    return asyncio.run(http_api._costs_endpoint(board, config)(request))


def test_servers_that_learn_nothing_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_costs(NVME) is None
    staged = TieredConfig(mode=TierMode.NVME, nvme=NVME.nvme, num_ranks=2, pp_size=2)
    for config, reason in (
        (TieredConfig(mode=TierMode.OFF), "--tier-mode off"),
        (TieredConfig(mode=TierMode.HOST), "--tier-mode host"),
        (staged, "--pp-size 2"),
    ):
        with CostBoard.create(1) as board:
            response = ask(board, config, monkeypatch)
        assert response.status_code == 404
        told = json.loads(response.body)
        assert f"learns no costs with {reason}" in told.pop("error")
        part = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}
        assert told == {**part, "draining": False}, "a key opens nothing else that says so"


def test_endpoint_answers_only_what_was_published(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = ask(server.board, NVME, monkeypatch)
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    server.publisher.publish_if_due()
    for drains in (False, True):
        response = ask(server.board, NVME, monkeypatch, drains=drains)
        found = parse_server_costs(response.body)
        assert (response.status_code, found.draining, found.num_ranks) == (200, drains, 1)
        assert len(response.body) < 2048
        assert math.isfinite(found.ranks[0].age_s)


@pytest.mark.parametrize(
    ("abandoned", "aborted"),
    [
        ("", []),
        ("70000", ["one"]),
        ("5,90000", ["of a list", "its second"]),
        (f"-1, ,x,7\u0660,{9**4400}", []),
    ],
)
def test_rooms_that_decode_never_asks_for_are_aborted(
    server: Server, monkeypatch: pytest.MonkeyPatch, abandoned: str, aborted: list[str]
) -> None:
    rooms = {"one": 70000, "of a list": 90000, "its second": 90001, "alone": None, "of rerank": ()}
    states = {rid: SimpleNamespace(obj=SimpleNamespace(), dispatched=True) for rid in rooms}
    states["early"] = SimpleNamespace(obj=SimpleNamespace(bootstrap_room=70000), dispatched=False)
    for rid, room in rooms.items():
        if room != ():
            states[rid].obj.bootstrap_room = room
    done: list[str] = []
    manager = SimpleNamespace(rid_to_state=states, abort_request=done.append)
    ask(server.board, NVME, monkeypatch, abandoned=abandoned, manager=manager)
    assert done == aborted


MODEL = CostModel(page_tokens=64, bytes_per_token=1000)


def record(rank: int = 0, *, at: float = 0.0, server: str = "") -> RankCosts:
    return record_of(MODEL, rank=rank, at=at, server=server)


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
    msgspec.structs.replace(record, boot=board.boot, server=letter * (3000 + turn))
    for turn, letter in enumerate("abcdefgh")
]
for number in range(10**9):
    board.write(msgspec.structs.replace(records[number % 8], at=float(number)), 100.0)
"""


def test_every_read_beside_a_writer_is_whole() -> None:
    """The writer is another process, which no lock of this interpreter holds up."""
    with CostBoard.create(1) as board:
        assert board.read() == ()
        environment = dict(os.environ)
        board.to_environment(environment)
        command = [sys.executable, "-c", WRITER, msgspec.json.encode(record())]
        with subprocess.Popen(command, env=environment) as writer:
            try:
                deadline = time.monotonic() + 60.0
                last, num_seen = -1.0, 0
                while num_seen < 5_000:
                    assert time.monotonic() < deadline and writer.poll() is None
                    for found in board.read(lambda: 102.5):
                        assert (found.age_s, found.boot) == (2.5, board.boot)
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
            board.close()
            child.write(record(), 0.0)
            assert len(child.read()) == 1
            child.close()
            child.close()
    assert len(os.listdir("/proc/self/fd")) == num_before
