"""Prefill and decode change places while clients wait: no request fails, answers stay the same, and
what was stored before is found after."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from route_front import Front

from conftest import PAGE, aligned, make_prompts
from kit.scrapes import by_rank
from kit.waiting import eventually
from prefill_decode import PrefillDecode, spawn_role, wait_until_healthy
from server_process import Server, free_port

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_PROMPTS, LENGTH, LONG = 4, 1500, 200
OTHER_PORT = free_port()  # of what decode becomes
KEPT = 512  # that decode keeps free for each of its requests
PROMPTS = make_prompts(4901, NUM_PROMPTS, LENGTH)
FLAGS = (
    *("--enable-pd-role-switch", "--enable-metrics", "--tier-load", "always"),
    *("--max-total-tokens", "8192", "--tier-host-bytes", "96MiB"),
    *("--chunked-prefill-size", "512"),
)


def record_of(server: Server) -> dict[str, Any]:
    record: dict[str, Any] = server.request("/tier/costs")["ranks"][0]
    return record


@pytest.fixture
def pair(model: Path, tmp_path: Path) -> Iterator[PrefillDecode]:
    prefill, decode = (("--tier-dir", str(tmp_path / name)) for name in ("one", "two"))
    decode += ("--disaggregation-bootstrap-port", str(OTHER_PORT))
    with PrefillDecode.spawn(model, tmp_path, *FLAGS, prefill=prefill, decode=decode) as made:
        yield made


def change_places(pair: PrefillDecode, port: int) -> None:
    """``port``: that of the new prefill."""

    def switch(server: Server, role: str) -> None:
        body = {"new_role": role, "decode_cuda_graph_memory_gb": 0}
        assert server.request("/pd_role_switch", body)["message"] == "ok"

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(switch, (pair.prefill, pair.decode), ("decode", "prefill")))
    pair.bootstrap_port = port
    pair.prefill, pair.decode = pair.decode, pair.prefill


def test_roles_change_under_traffic(pair: PrefillDecode, stock: Server) -> None:
    """The orders come while requests run; those end first, in their old roles."""
    expected = [answer.output_ids for answer in stock.generate_all(PROMPTS)]
    long = [answer.output_ids for answer in stock.generate_all(PROMPTS, num_new=LONG)]
    assert [reply.output_ids for reply in pair.generate_all(PROMPTS)] == expected
    cold_bytes, first_port = pair.handed_over_bytes, pair.bootstrap_port
    first = (pair.prefill, pair.decode)
    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        asked = [pool.submit(pair.generate, prompt, LONG) for prompt in PROMPTS]
        seen: list[dict[str, Any]] = []

        def generates() -> bool:
            seen.append(record_of(pair.decode)["decode"])
            return bool(seen[-1]["requests"] > 0)

        eventually(generates, "it generates")
        told = seen[-1]
        assert 0 <= told["tokens"] / told["requests"] - LENGTH - KEPT <= LONG + 1
        change_places(pair, OTHER_PORT)
        assert [future.result(60).output_ids for future in asked] == long
    for server in first:
        stored = server.tier_state()["tier_pages:nvme"]
        assert stored >= NUM_PROMPTS * (aligned(LENGTH) // PAGE), "before it switched, and kept"
    prefilled, decoded = pair.both(PROMPTS[0])
    assert decoded.output_ids == expected[0]
    assert prefilled.body["meta_info"]["cached_tokens"] >= aligned(LENGTH), prefilled
    assert [reply.output_ids for reply in pair.generate_all(PROMPTS)] == expected
    assert pair.handed_over_bytes < 0.1 * cold_bytes, "decode found what it stored as prefill"
    for server in first:
        text = server.request("/metrics")
        assert by_rank(text, "transfer_rooms_ended_total", outcome="failed") == {"0": 0.0}
        assert by_rank(text, "transfer_rooms_ended_total", outcome="done")["0"] > NUM_PROMPTS
    for turn, port in enumerate((first_port, OTHER_PORT, first_port)):  # back and forth
        change_places(pair, port)
        prompts = [PROMPTS[turn], *make_prompts(4910 + turn, 3, 700)]
        got = [reply.output_ids for reply in pair.generate_all(prompts)]
        assert got == [answer.output_ids for answer in stock.generate_all(prompts)]
        roles = [record_of(server)["role"] for server in (pair.prefill, pair.decode)]
        assert roles == ["prefill", "decode"], "routers learn of it"


def test_the_picker_moves_a_server_to_work(model: Path, tmp_path: Path) -> None:
    """One prefills as much as it can, and one of two that decode has nothing to do. Orders have
    keys made of the operator's."""
    key, flags = tmp_path / "key", (*FLAGS, "--admin-api-key", "operator-of-the-test")
    key.write_text(flags[-1])
    one, two, three = (("--tier-dir", str(tmp_path / name)) for name in ("one", "two", "three"))
    two += ("--disaggregation-bootstrap-port", str(OTHER_PORT))
    prompts, ended = iter(make_prompts(4930, 500, 3500)), threading.Event()

    def prefills() -> None:
        while not ended.is_set():
            assert pair.generate(next(prompts), 1).status == 200

    with ExitStack() as held:
        idle = spawn_role(model, tmp_path / "idle.log", "decode", free_port(), (*flags, *three))
        held.callback(idle.kill)
        servers = PrefillDecode.spawn(model, tmp_path, *flags, prefill=one, decode=two)
        pair = held.enter_context(servers)
        wait_until_healthy(idle)
        urls = [server.url for server in (pair.prefill, pair.decode, idle)]
        orders = ("--server-key-file", str(key), "--balance", "on", "--balance-cooldown", "10s")
        front = held.enter_context(closing(Front.start(tmp_path, urls, "--envoy", "off", *orders)))
        front.wait_until_ready(3)
        with ThreadPoolExecutor(3) as pool:
            working = [pool.submit(prefills) for _ in range(3)]
            try:
                eventually(lambda: "has taken its new role" in front.log, timeout_s=120)
            finally:
                ended.set()
            for work in working:
                work.result()
        expected = dict(zip(urls, ("prefill", "decode", "prefill"), strict=True))
        eventually(lambda: {r["url"]: r["role"] for r in front.servers() if r["ready"]} == expected)
