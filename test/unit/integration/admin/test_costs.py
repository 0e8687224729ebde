"""Records tell what the scheduler believes, and not through its loop."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from starlette.requests import Request

from kit.cost_records import record_of
from sglang_tiered.api import CostsCall
from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode
from sglang_tiered.integration.admin import costs, http_api
from sglang_tiered.integration.admin.costs import CostBoard, CostPublisher, serving_url
from sglang_tiered.policy.cost_model import CostModel
from sglang_tiered.policy.server_costs import ABANDONED, RankCosts, parse_server_costs
from sglang_tiered.storage.base import Tier

NVME = TieredConfig(
    mode=TierMode.NVME,
    nvme=NvmeConfig(directory="/d", capacity_bytes=1 << 30, region_bytes=1 << 22),
)


class Server:
    """A scheduler over the real cache, its board, and a clock that moves when told."""

    def __init__(self, cache: Any, board: CostBoard) -> None:
        self.cache, self.board, self.now = cache, board, 1000.0
        stats = SimpleNamespace(get_kv_token_stats=lambda: (77, 0.0))
        self.scheduler = SimpleNamespace(
            disaggregation_mode=SimpleNamespace(value="null"),
            pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: stats),
            running_batch=SimpleNamespace(reqs=[SimpleNamespace()] * 2),
            waiting_queue=["r"],
            chunked_req=None,
            max_running_requests=8,
            max_total_num_tokens=4096,
            decode_moment_totals=[0.0] * 6,
            server_args=SimpleNamespace(disaggregation_bootstrap_port=8998, device="cpu"),
        )
        clocks = {"clock": lambda: self.now, "wall_clock": lambda: self.now}
        self.publisher = CostPublisher(self.scheduler, cache, board, rank=0, **clocks)
        cache.tiering.publish_costs = self.publisher.publish_if_due

    def read(self) -> RankCosts:
        (record,) = self.board.read(lambda: self.now)
        return record


@pytest.fixture
def server(cache: Any) -> Iterator[Server]:
    with CostBoard.create(1) as board:
        yield Server(cache, board)


@pytest.mark.parametrize(
    ("dp_size", "attn_dp_size", "nnodes", "num_local"),
    [(1, 1, 2, 1), (1, 4, 2, 2), (1, 3, 2, 2), (4, 1, 2, 4)],
)
def test_board_tells_which_ranks_can_reach_it(
    dp_size: int, attn_dp_size: int, nnodes: int, num_local: int
) -> None:
    """Or what waits for a server of several machines waits for ranks that write elsewhere."""
    settings = SimpleNamespace(dp_size=dp_size, attn_dp_size=attn_dp_size, nnodes=nnodes)
    with CostBoard.of_server(settings) as board:
        assert (board.num_ranks, board.num_local_ranks) == (dp_size * attn_dp_size, num_local)


def test_record_tells_what_the_planner_believes(server: Server) -> None:
    planner = server.cache.tiering.planner
    planner.note_batch([(2048, 0)], 0.5, 100)
    planner.costs.transfers[2].observe(1 << 24, 3.0)
    planner.arrives("r", num_held=0, num_new=700, num_before=64, num_ahead=0)
    server.scheduler.chunked_req = SimpleNamespace(seqlen=900, extend_end=300)
    server.cache.tiering.prefill_begins([(300, 0)], server.now)
    record, costs = server.read(), planner.costs
    assert record.prefill.prices == costs.prefill.prices
    tiers = [record.tiers[tier.value] for tier in Tier]
    assert [tier.prices for tier in tiers] == [cost.prices for cost in costs.transfers]
    assert [tier.healthy for tier in tiers] == [True, False, False]
    assert record.namespace == server.cache.storage.namespace.hex() != ""
    assert (record.page_tokens, record.boot) == (server.cache.page_size, server.board.boot)
    assert record.queue_wait_s == planner.queue_wait_s > 0
    assert (record.waiting.requests, record.waiting.tokens) == (1, 700)
    first_s = costs.prefill.prices[0] + costs.prefill.seconds(300, 0)
    rest_s = costs.prefill.seconds(600, 300)
    assert record.running_prefill_s == pytest.approx(first_s + rest_s)
    assert (record.decode.requests, record.device.held_tokens) == (2, 77)
    asked = {"num_held": 256, "num_new": 700, "num_before": 0, "queue_wait_s": 0.1}
    assert record.cost_model().plan(**asked) == costs.plan(**asked)


def test_failed_record_never_stops_the_scheduler(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.publisher.publish_if_due()
    server.scheduler.running_batch = None
    for _ in range(3):
        server.publisher.rests()
        server.now += 1.0
        server.cache.tiering.step()
        server.cache.tiering.prefill_begins([(100_000, 0)], server.now)
    assert server.read().at == 1000.0
    assert len([line for line in caplog.messages if "no costs are published" in line]) == 1


def ask(
    board: CostBoard,
    config: TieredConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    drains: bool = False,
    abandoned: str = "",
    states: Any = None,
) -> tuple[Any, list[str]]:
    """The answer, and the requests that the server gave up with it."""
    aborted: list[str] = []
    settings = {"kv_events_config": None, "page_size": 64, "disaggregation_bootstrap_port": 8998}
    manager = SimpleNamespace(
        rid_to_state=states or {},
        abort_request=aborted.append,
        gracefully_exit=drains,
        server_args=SimpleNamespace(**settings),
        disaggregation_mode=DisaggregationMode.PREFILL,
    )
    module: Any = ModuleType("sglang.srt.entrypoints.http_server")
    module.get_global_state = lambda: SimpleNamespace(tokenizer_manager=manager)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    headers = [(ABANDONED.encode(), abandoned.encode())]
    request = Request({"type": "http", "query_string": b"", "headers": headers})
    endpoint = http_api._endpoint(CostsCall, partial(http_api._costs, board, config), has_key=True)
    return asyncio.run(endpoint(request)), aborted


def test_servers_that_learn_nothing_say_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = TieredConfig(mode=TierMode.NVME, nvme=NVME.nvme, num_ranks=2, pp_size=2)
    for config, reason in (
        (TieredConfig(mode=TierMode.HOST), "--tier-mode host"),
        (staged, "--pp-size 2"),
    ):
        response, _ = ask(server.board, config, monkeypatch)
        told = json.loads(response.body)
        assert response.status_code == 404
        assert f"learns no costs with {reason}" in told.pop("error")
        part = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}
        assert told == {**part, "draining": False}, "a key opens nothing else that says so"


def test_endpoint_answers_only_what_was_published(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, _ = ask(server.board, NVME, monkeypatch)
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    server.publisher.publish_if_due()
    for drains in (False, True):
        response, _ = ask(server.board, NVME, monkeypatch, drains=drains)
        found = parse_server_costs(response.body)
        assert (response.status_code, found.draining, found.num_ranks) == (200, drains, 1)


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
    rooms = {"one": 70000, "of a list": 90000, "its second": 90001, "alone": None, "early": 70000}
    states = {
        rid: SimpleNamespace(obj=SimpleNamespace(bootstrap_room=room), dispatched=rid != "early")
        for rid, room in rooms.items()
    }
    states["of rerank"] = SimpleNamespace(obj=SimpleNamespace(), dispatched=True)
    assert ask(server.board, NVME, monkeypatch, abandoned=abandoned, states=states)[1] == aborted


@pytest.mark.parametrize(
    ("host", "peer", "expected"),
    [("0.0.0.0", "192.0.2.7", "192.0.2.7"), ("::", "[2001:db8::7]", "[2001:db8::7]")]
    + [("2001:db8::1", "x", "[2001:db8::1]"), ("kv-3.example", "x", "kv-3.example")],
)
def test_url_is_one_that_others_reach(host: str, peer: str, expected: str) -> None:
    url = serving_url(host, 1, is_tls=False, peer_address=f"tcp://{peer}:7001")
    assert url == f"http://{expected}:1"


MODEL = CostModel(page_tokens=64, bytes_per_token=1000)


def record(rank: int = 0, *, at: float = 0.0) -> RankCosts:
    return record_of(MODEL, rank=rank, at=at, server="")


def test_half_a_record_leaves_the_one_before() -> None:
    """As a writer leaves it that is killed meanwhile."""
    with CostBoard.create(1) as board:
        board.write(record(at=1.0), 0.0)
        board.write(record(at=2.0), 0.0)
        start = costs._start(0, 0)  # of the second one
        for place in (start, start + 4, start + 200):
            byte = board._memory[place]
            board._memory[place] = byte ^ 1
            assert [found.at for found in board.read()] == [1.0], place
            board._memory[place] = byte
        assert [found.at for found in board.read()] == [2.0]


def test_no_other_file_is_taken_for_the_board(tmp_path: Path) -> None:
    """Its launcher may have ended, and its number be that of a process with a file of that size."""
    environment: dict[str, str] = {}
    with CostBoard.create(2, 1) as board:
        board.to_environment(environment)
        opened = CostBoard.from_environment(environment)
        assert opened is not None and (opened.boot, opened.num_ranks) == (board.boot, 2)
        with opened:
            opened.write(record(at=3.0), 0.0)
        assert [found.at for found in board.read()] == [3.0]
    (told,) = environment.values()
    file = tmp_path / "file"
    file.write_bytes(bytes(4 * costs.PLACE_BYTES))
    with file.open() as opened_file, CostBoard.create(3, 1) as another:  # of another server
        path = f"/proc/{os.getpid()}/fd/{opened_file.fileno()}"
        other = {costs.ENVIRONMENT_VARIABLE: ":".join([path, *told.split(":")[1:]])}
        another.to_environment(environment)
        path = environment[costs.ENVIRONMENT_VARIABLE].split(":")[0]
        environment[costs.ENVIRONMENT_VARIABLE] = ":".join([path, *told.split(":")[1:]])
        num_open = len(os.listdir("/proc/self/fd"))
        for each in (environment, other):
            assert CostBoard.from_environment(each) is None
        assert len(os.listdir("/proc/self/fd")) == num_open
    environment[costs.ENVIRONMENT_VARIABLE] = told
    assert CostBoard.from_environment(environment) is None
