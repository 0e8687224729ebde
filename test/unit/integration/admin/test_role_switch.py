"""A server is drained before its role is switched, and goes on with its role where it cannot be. A
key of one call opens that call alone, whichever key the operator's is; of a switch of roles, one
order to one start of one server."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import PdRoleSwitchReqInput, PdRoleSwitchReqOutput
from sglang.srt.utils.auth import AuthLevel, decide_request_auth

from sglang_tiered.integration.admin import role_switch
from sglang_tiered.integration.admin.role_switch import (
    around_auth,
    around_switch,
    is_draining,
    model_door,
    ordered_role,
)
from sglang_tiered.policy.server_costs import (
    COSTS_CALL,
    FRESH_S,
    NOT_IDLE,
    SWITCH_CALL,
    costs_key,
    switch_key,
)

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


@pytest.mark.parametrize(
    ("answers", "running", "said", "num_asked"),
    [
        # What waits to be stored ends with it.
        (("ok", f"{NOT_IDLE}; pages wait to be stored", NOT_IDLE, "ok"), 0, "ok", 4),
        # A busy server keeps its role.
        (("ok",), 1, "was not drained within", 1),
        ((NOT_IDLE,), 0, "was not drained within", None),
        # A final refusal comes at once.
        (("zmq cannot",), 0, "zmq cannot", 1),
        (("ok", "zmq cannot"), 0, "zmq cannot", 2),
        # SGLang rolls nothing back: who broke gets no more requests.
        (("ok", BROKEN), 0, BROKEN, 2),
    ],
)
def test_a_server_goes_on_unless_it_broke(
    answers: tuple[str, ...], running: int, said: str, num_asked: int | None
) -> None:
    server = Server(*answers, running=running)
    answer = asyncio.run(around_switch(server.switch, server, DECODE))
    assert said in answer.message and answer.success is (said == "ok")
    assert answer.safe_to_restore is not (said == BROKEN)
    assert num_asked in (None, len(server.asked))
    assert is_draining(server) is (said == BROKEN)
    if said == BROKEN:
        assert asyncio.run(ask_door(server)) == 503


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


# ---- Keys ----

CALLS = (COSTS_CALL, SWITCH_CALL, "GET /tier/tenants", "POST /flush_cache")
OTHER_BOOT = "00" * 16


@pytest.fixture(autouse=True)
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang tells of the server to its process of HTTP."""
    serving = SimpleNamespace(fastapi_root_path="")
    monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a server that this process is."""
    monkeypatch.setattr(role_switch, "_boot", "")
    role_switch.take_orders("17" * 16)
    return "17" * 16


def opened(key: str, admin: str | None = None, api: str | None = "own") -> list[str]:
    """The calls that a key opens, which was not used before."""
    allowed = []
    role_switch._orders.clear()
    for call in CALLS:
        if is_allowed(call, key, admin, api):
            allowed.append(call)
        assert not is_allowed(call, None, admin, api)
    return allowed


def is_allowed(
    call: str, key: str | None, admin: str | None = None, api: str | None = "own"
) -> bool:
    method, path = call.split()
    told: dict[str, Any] = {"method": method, "path": path, "api_key": api, "admin_api_key": admin}
    told |= {"authorization_header": key and f"Bearer {key}"}
    return around_auth(decide_request_auth, **told, auth_level=AuthLevel.ADMIN_OPTIONAL).allowed


@pytest.mark.parametrize("operators", [("own", None), ("own", "other"), (None, "own")])
def test_a_key_of_one_call_opens_it_alone(
    operators: tuple[str | None, str | None], boot: str
) -> None:
    until_s = int(time.time()) + 60
    assert opened("own", *operators) == [*CALLS]
    for key, calls in (("own", 1), ("other", 0)):
        assert opened(costs_key(key), *operators) == [COSTS_CALL] * calls
        order = switch_key(key, boot, "decode", until_s)
        assert opened(order, *operators) == [SWITCH_CALL] * calls


def test_order_is_of_one_start_role_and_time(boot: str) -> None:
    """Whoever it was sent to may pass it on."""
    until_s = int(time.time()) + 60
    order = switch_key("own", boot, "decode", until_s)
    assert ordered_role({"authorization": f"Bearer {order}"}) == "decode"
    assert opened(order) == [SWITCH_CALL]
    for other in (
        switch_key("own", OTHER_BOOT, "decode", until_s),
        switch_key("own", boot, "decode", until_s - 61),
        order.replace("decode", "prefill"),
        order.replace(str(until_s), str(until_s + 1)),
        order[:-1],
    ):
        assert not opened(other)
    for given in ("Bearer own", "", "decode", f"Bearer {order}x"):
        assert ordered_role({"authorization": given}) == ""


def test_an_order_is_taken_once(boot: str) -> None:
    order = switch_key("own", boot, "decode", int(time.time()) + 60)
    taken = [is_allowed(SWITCH_CALL, key) for key in (order, order, "own", "own")]
    assert taken == [True, False, True, True], "the operator's own key opens it again and again"


def test_a_server_without_costs_takes_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_switch, "_boot", "")
    assert not opened(switch_key("own", "", "decode", int(time.time()) + 60))
