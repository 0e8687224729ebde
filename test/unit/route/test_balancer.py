"""The picker has servers change their roles: one at a time, and whoever fails at it no more."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from route_mocks import Mocks

from server_process import free_ports
from sglang_tiered.policy.balance import RoleBalance
from sglang_tiered.policy.server_costs import FRESH_S, NOT_IDLE, switch_key
from sglang_tiered.route.fleet import ORDER_S, Fleet, Member
from sglang_tiered.route.service import PickerService
from sglang_tiered.route.settings import RouteConfig, Source

COOLDOWN_S = 0.3
KEY = "operator"


@pytest.fixture
def mocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mocks]:
    """One server that prefills, and has more to do than it can; three that rest."""
    monkeypatch.setattr("sglang_tiered.route.service.LOOK_S", 0.02)
    monkeypatch.setattr("sglang_tiered.policy.balance.MAX_DOUBLED", 0)
    made = Mocks([0] * 4)
    for number, mock in enumerate(made):
        mock.costs = {"role": "decode"} if number else {"role": "prefill", "busy": 1.0}
    yield made
    made.close()


def serve(
    mocks: Mocks, folder: Path, until: Callable[[str], bool], for_s: float = 0.0, **more: Any
) -> str:
    """Run a picker until its metrics are so, and so much longer; returns them."""
    (folder / "servers").write_text("".join(f"{mock.url}\n" for mock in mocks))
    (folder / "key").write_text(KEY)
    config = RouteConfig(
        servers=str(folder / "servers"),
        key_file=str(folder / "key"),
        port=free_ports(3),  # two above it are the picker's
        **({"with_balance": True, "balance_cooldown_s": COOLDOWN_S} | more),
    )

    async def work() -> str:
        service = PickerService(config)
        running = asyncio.create_task(service.run())

        def metrics() -> str:
            return service._numbers.text(service.fleet, service.reader, 0.0).decode()

        try:
            async with asyncio.timeout(20):
                while True:
                    await asyncio.sleep(0.02)
                    if until(metrics()):
                        break
            await asyncio.sleep(for_s)
            return metrics()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return asyncio.run(work())


def tells(why: str, metrics: str) -> bool:
    """Why roles stay."""
    return f'route_balance{{sglang_tiered_route_balance="{why}"}} 1.0' in metrics


def switches(metrics: str) -> dict[tuple[str, str], float]:
    """By outcome and role."""
    found = re.findall(r'route_role_switches_total\{outcome="(.*)",role="(.*)"\} (.*)', metrics)
    return {(outcome, role): float(number) for outcome, role, number in found}


def asked(mocks: Mocks) -> list[int]:
    return [len(mock.orders) for mock in mocks]


def test_an_idle_server_takes_the_busy_role(
    mocks: Mocks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    until = lambda told: bool(switches(told)) and tells("measuring", told)  # noqa: E731
    metrics = serve(mocks, tmp_path, until, balance_graph_memory=3 << 29)
    (order,) = [order for mock in mocks for order in mock.orders]
    assert not mocks[0].orders and order["new_role"] == "prefill"
    (port,) = (mock.port for mock in mocks if mock.orders)
    until_s = int(order["key"].split(".")[1])
    assert order["key"] == f"Bearer {switch_key(KEY, f'{port:032x}', 'prefill', until_s)}"
    assert 0 < until_s - time.time() <= ORDER_S
    assert order["decode_cuda_graph_memory_gb"] == 1.5
    assert switches(metrics) == {("switched", "prefill"): 1.0}
    assert 'route_role_load{role="prefill"} NaN' in metrics, "it is measured anew"
    assert "prefill has work for 1.00 of 1 servers, decode for 0.00 of 3" in caplog.text
    assert "has taken its new role" in caplog.text
    assert "roles stay: servers were not in these roles for long enough" in caplog.text


def test_no_two_servers_switch_within_a_cooldown(mocks: Mocks, tmp_path: Path) -> None:
    """And one keeps its role at any load."""
    times: list[float] = []

    async def slowly(request: web.Request) -> web.Response:
        mock = next(one for one in mocks if one.port == request.url.port)
        times.append(time.monotonic())
        await asyncio.sleep(COOLDOWN_S)
        times.append(time.monotonic())
        mock.costs = {"role": "prefill", "busy": 1.0}
        return web.json_response({"success": True, "message": "ok", "safe_to_restore": True})

    for mock in mocks:
        mock.switch = slowly
    serve(mocks, tmp_path, lambda _: len(times) == 4, for_s=3 * COOLDOWN_S)
    assert sum(asked(mocks)) == 2, "one has to decode"
    assert times[2] - times[1] >= COOLDOWN_S


def says(status: int, **body: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    return answer


async def reset(request: web.Request) -> web.Response:
    assert isinstance(request.transport, asyncio.Transport)
    request.transport.abort()
    return web.Response()


async def hang(_: web.Request) -> web.Response:
    await asyncio.sleep(0.5)
    return web.Response()


HALF = {"success": False, "message": "role switch failed", "safe_to_restore": False}


def says_not(message: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """As SGLang does where nothing is broken."""
    return says(400, success=False, message=message, safe_to_restore=True)


async def nests(_: web.Request) -> web.Response:
    return web.Response(body=b'{"x":' + b"[" * 100_000)


@pytest.mark.parametrize(
    "answers",
    [
        {
            "role switch failed": says(400, **HALF),
            "it answers 401": says(401, error="a wrong key"),
            "missing required field": says(200, error="x"),
        },
        {
            "--enable-pd-role-switch is not set": says_not("--enable-pd-role-switch is not set"),
            "insufficient decode CUDA graph": says_not("insufficient decode CUDA graph headroom"),
            "maximum recursion depth": nests,
        },
    ],
)
def test_who_never_can_is_asked_no_more(
    answers: dict[str, Any], mocks: Mocks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for number, answer in enumerate(answers.values(), 1):
        mocks[number].switch = answer
    metrics = serve(mocks, tmp_path, lambda _: "is asked any more" in caplog.text)
    assert asked(mocks) == [0, 1, 1, 1]
    assert all(said in caplog.text for said in answers)
    assert switches(metrics) == {("given-up", "prefill"): 3.0}
    assert 'route_role_load{role="prefill"} 1.0' in metrics
    assert 'route_headroom{split="best"} 3.0' in metrics


def test_a_lost_answer_is_asked_for_again(
    mocks: Mocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A network that fails for a moment says nothing of a server; nor does a proxy's 504."""
    monkeypatch.setattr("sglang_tiered.route.service.SWITCH_S", 0.25)

    def passes(metrics: str) -> bool:
        if sum(asked(mocks)) == 3:
            for mock in mocks:
                mock.switch = None
        return ("switched", "prefill") in switches(metrics)

    for mock, answer in zip(mocks.all[1:], (says(504), reset, hang), strict=True):
        mock.switch = answer
    metrics = serve(mocks, tmp_path, passes)
    assert sorted(asked(mocks)) == [0, 1, 1, 2]
    assert switches(metrics) == {("lost", "prefill"): 3.0, ("switched", "prefill"): 1.0}
    assert all(said in caplog.text for said in ("it answers 504", "disconnected", "TimeoutError"))


def test_connecting_to_nobody_ends_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "servers").touch()
    monkeypatch.setattr("sglang_tiered.route.fleet.ANSWER_S", 0.2)

    async def ask(port: int) -> None:
        fleet = Fleet(Source(str(tmp_path / "servers")))
        fleet._session = aiohttp.ClientSession()
        member = Member(f"http://127.0.0.1:{port}", f"127.0.0.1:{port}")
        try:
            async with asyncio.timeout(20):
                await fleet.switch(member, "prefill", 0.0, within_s=60.0)
        finally:
            await fleet.close()

    with contextlib.ExitStack() as held:
        full = held.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # nobody accepts them
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        with pytest.raises(aiohttp.ServerTimeoutError):
            asyncio.run(ask(full.getsockname()[1]))


def test_nobody_is_asked_while_another_drains(
    mocks: Mocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a picker's restart. But one that drains for ever does not keep the others."""
    monkeypatch.setattr("sglang_tiered.route.service.SWITCH_S", 5 * COOLDOWN_S)
    began, seen = time.monotonic(), []

    def looks(metrics: str) -> bool:
        seen.append(tells("switching", metrics))
        return sum(asked(mocks)) == 1

    mocks[3].is_draining = True
    serve(mocks, tmp_path, looks)
    assert time.monotonic() - began >= 6 * COOLDOWN_S
    assert any(seen[:-1]) and not mocks[3].orders


def test_who_is_ordered_is_picked_no_more(mocks: Mocks, tmp_path: Path) -> None:
    """From then on, not from when it says so: of a refused half of a pair nobody hears."""

    async def drains(_: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return web.json_response({"success": False, "message": NOT_IDLE}, status=400)

    for mock in mocks:
        mock.switch = drains
    one_less = 'sglang_tiered_route_servers{state="ready"} 3.0'
    serve(mocks, tmp_path, lambda metrics: bool(sum(asked(mocks))) and one_less in metrics)


def test_a_silent_server_keeps_no_floor(mocks: Mocks, tmp_path: Path) -> None:
    """Two of three that decode tell nothing any more: the third is not taken away from them."""
    silent_s: list[float] = []
    mocks[0].costs = {"role": "prefill", "busy": 0.0}

    async def wait(_: web.Request) -> web.Response:
        await asyncio.sleep(FRESH_S)
        return web.Response()

    def looks(metrics: str) -> bool:
        if not silent_s and tells("calm", metrics):
            silent_s.append(time.monotonic())
            for mock in mocks.all[2:]:
                mock.costs = wait
        elif silent_s and time.monotonic() - silent_s[0] > FRESH_S + 0.2:
            mocks[0].costs = {"role": "prefill", "busy": 1.0}
        return tells("floor", metrics)

    serve(mocks, tmp_path, looks, for_s=2 * COOLDOWN_S)
    assert not sum(asked(mocks))


def test_an_error_ends_no_balance(
    mocks: Mocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look, errors, seen = RoleBalance.look, iter(range(30)), []

    def fails(*told: Any, **more: Any) -> Any:
        assert next(errors, None) is None, "no servers are looked at"
        return look(*told, **more)

    def looks(metrics: str) -> bool:
        seen.append(tells("failed", metrics))
        return bool(switches(metrics))

    monkeypatch.setattr(RoleBalance, "look", fails)
    serve(mocks, tmp_path, looks)
    assert any(seen) and caplog.text.count("internal error") == 1


def test_a_restarted_server_is_another_one(mocks: Mocks, tmp_path: Path) -> None:
    def restarts(metrics: str) -> bool:
        if asked(mocks) == [0, 1, 1, 1] and mocks[2].switch is not None:
            mocks[2].switch = None
            mocks[2].costs = {"role": "decode", "boot": "22" * 16}
        return ("switched", "prefill") in switches(metrics)

    for mock in mocks:
        mock.switch = says(400, **HALF)
    serve(mocks, tmp_path, restarts)
    assert asked(mocks) == [0, 1, 2, 1]


async def part(_: web.Request) -> web.Response:
    told = {"disaggregation_mode": "decode", "disaggregation_bootstrap_port": 8998}
    return web.json_response({"error": "no costs", **told}, status=404)


@pytest.mark.parametrize("is_imitated", [False, True])
def test_without_costs_of_its_own_nobody_switches(
    is_imitated: bool, mocks: Mocks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who names another's start could pass the order's key on."""
    caplog.set_level("INFO")
    start = {**mocks[3].costs, "boot": f"{mocks[2].port:032x}"}
    mocks[3].costs = start if is_imitated else part
    named = ", ".join(mock.url for mock in mocks.all[2 if is_imitated else 3 :])
    told = f"a server tells no costs, or those of another one: {named}\n"
    serve(mocks, tmp_path, lambda _: told in caplog.text, for_s=2 * COOLDOWN_S)
    assert not sum(asked(mocks))


def test_roles_stay_unless_asked_for(mocks: Mocks, tmp_path: Path) -> None:
    off = {"with_balance": False, "balance_cooldown_s": 60.0}
    until = lambda _: all(mock.asked for mock in mocks)  # noqa: E731
    metrics = serve(mocks, tmp_path, until, for_s=3 * COOLDOWN_S, **off)
    assert tells("off", metrics)
    assert not sum(asked(mocks))
