"""A server is drained before its role is switched, and goes on with its role where it cannot be."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import PdRoleSwitchReqInput, PdRoleSwitchReqOutput

from sglang_tiered.integration.admin import role_switch
from sglang_tiered.integration.admin.role_switch import around_switch, is_draining, model_door
from sglang_tiered.policy.server_costs import FRESH_S, NOT_IDLE, switch_key

DECODE = PdRoleSwitchReqInput(new_role="decode")
BROKEN = "role switch failed; instance unhealthy"
TOLD_S = role_switch.TOLD_S


class Server:
    """SGLang's ``TokenizerManager``. ``answers``: of its schedulers, the last again and again.
    ``asked``: whether each question was one to prepare, and whether routers knew that it drains."""

    def __init__(self, *answers: str, running: int = 0) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[bool, bool]] = []
        self.gracefully_exit = False
        self.rid_to_state = dict.fromkeys(range(running))
        self.passed: list[str] = []
        self.ended: Any = None

    async def switch(self, _: Any, message: Any, __: Any = None) -> Any:
        self.asked.append((message.prepare_only, is_draining(self)))
        said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        told = {"message": said, "old_role": "prefill", "new_role": message.new_role}
        return PdRoleSwitchReqOutput(success=said == "ok", safe_to_restore=said != BROKEN, **told)

    def ask(self) -> Any:
        return asyncio.run(around_switch(self.switch, self, DECODE))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_switch, "TOLD_S", 0.02)
    monkeypatch.setattr(role_switch, "DRAINED_S", 0.5)


def test_door_shuts_when_every_picker_knows() -> None:
    assert TOLD_S > FRESH_S, "or counts no more on what the server said before"


async def ask_door(server: Server, path: str = "/generate", method: str = "POST") -> int:
    """The status of a request that SGLang answers when ``ended`` is set, or one of the door's."""
    said: list[int] = []

    async def app(_: Any, receive: Any, send: Any) -> None:
        server.passed.append(path)
        await send({"type": "http.response.start", "status": 200})
        await receive()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            said.append(message["status"])

    server.ended = server.ended or asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=server))
        root = "/llm" if path.startswith("/llm/") else ""  # as uvicorn tells it
        scope = {"type": "http", "path": path, "root_path": root, "method": method}
        await model_door(app)(scope, server.ended.wait, send)
    return said[0]


@pytest.mark.parametrize("answer", ["ok", "zmq cannot"])
def test_late_request_meets_no_switch(answer: str) -> None:
    """It would reach a scheduler of the other role. Until routers know, it is taken."""
    server = Server("ok", answer)

    async def all_of_them() -> Any:
        asking = asyncio.create_task(around_switch(server.switch, server, DECODE))
        await asyncio.sleep(0)
        assert is_draining(server)
        early = asyncio.create_task(ask_door(server))
        await asyncio.sleep(0.1)
        assert server.passed == ["/generate"]
        for path in ("/generate", "/v1/chat/completions", "/api/chat", "/encode", "/llm/generate"):
            assert await ask_door(server, path) == 503
        server.ended.set()  # now: nothing that the door lets through waits
        assert await ask_door(server, "/v1/models", "GET") == 200
        assert await ask_door(server, "/tier/costs") == 200
        assert server.asked == [(True, False)], "no scheduler was asked while one is inside"
        assert await early == 200
        return await asking, await ask_door(server)

    answered, late = asyncio.run(all_of_them())
    assert answered.message == answer and late == 200
    assert server.asked[1:] == [(False, True)]


def test_switch_waits_for_its_stores() -> None:
    server = Server("ok", f"{NOT_IDLE}; pages wait to be stored", NOT_IDLE, "ok")
    assert server.ask().success
    assert len(server.asked) == 4


def test_busy_server_keeps_its_role() -> None:
    for server in (Server("ok", running=1), Server(NOT_IDLE)):
        answer = server.ask()
        assert not answer.success and answer.safe_to_restore
        assert "was not drained within" in answer.message
        assert not is_draining(server)


@pytest.mark.parametrize("after", [1, 2])
def test_final_refusal_comes_at_once(after: int) -> None:
    server = Server(*["ok"] * (after - 1), "zmq cannot")
    assert server.ask().message == "zmq cannot"
    assert len(server.asked) == after and not is_draining(server)


def test_broken_switch_gets_no_more_requests() -> None:
    """SGLang rolls nothing back."""
    server = Server("ok", BROKEN)
    assert server.ask().message == BROKEN
    assert is_draining(server) and asyncio.run(ask_door(server)) == 503


def test_second_order_ends_no_drain_of_the_first() -> None:
    server = Server("ok", running=1)

    async def both() -> Any:
        first = asyncio.create_task(around_switch(server.switch, server, DECODE))
        await asyncio.sleep(0.1)
        second = await around_switch(server.switch, server, DECODE)
        assert not second.success and "in progress" in second.message
        assert is_draining(server), "for the first"
        server.rid_to_state.clear()
        return await first

    assert asyncio.run(both()).success
    assert server.asked == [(True, False), (True, True), (False, True)]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_key_for_one_role_orders_no_other(role: str) -> None:
    server = Server("ok")
    key = switch_key("own", "00" * 16, role, 1 << 31)
    request = SimpleNamespace(headers={"authorization": f"Bearer {key}"})
    answer = asyncio.run(around_switch(server.switch, server, DECODE, request))
    assert answer.success is (role == "decode")
    assert [prepares for prepares, _ in server.asked] == [True, False][: 1 + answer.success]
    assert not is_draining(server)
