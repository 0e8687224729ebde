"""Servers that answer the picker with too much, with nonsense, or with somebody else's address: it
goes on asking them, and keeps none of it."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from route_mocks import Mock, Mocks

from kit.waiting import eventually
from sglang_tiered.policy.server_costs import EventSource, costs_key
from sglang_tiered.route import fleet
from sglang_tiered.route.envoy import CLUSTERS, read_members
from sglang_tiered.route.fleet import Fleet, Member
from sglang_tiered.route.replicas import DEVICE
from sglang_tiered.route.settings import Source
from sglang_tiered.sharing import membership

ENOUGH_BYTES = 32 << 20
"""More than the picker may take of any answer, less than a server can send before its deadline."""


class Followed:
    """A fleet of mock servers, on their thread."""

    def __init__(self, folder: Path, number: int) -> None:
        self.mocks = Mocks([0] * number)
        (folder / "servers").write_text("".join(f"{mock.url}\n" for mock in self.mocks))
        self.folder = folder
        self.fleet: Fleet = self.mocks.run(self._start(str(folder / "servers")))

    async def _start(self, servers: str) -> Fleet:
        fleet = Fleet(Source(servers), key="secret", members_directory=self.folder)
        self._work = asyncio.create_task(fleet.run())
        return fleet

    @property
    def server(self) -> Mock:
        return self.mocks[0]

    @property
    def member(self) -> Member:
        return self.fleet.members[self.server.address]

    def wait_until_asked(self, again: int = 1) -> None:
        """So often from now on."""
        asked = len(self.server.asked) + again
        eventually(lambda: len(self.server.asked) > asked)

    async def _close(self) -> None:
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        await self.fleet.close()

    def close(self) -> None:
        self.mocks.run(self._close())
        self.mocks.close()


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    made = Followed(tmp_path, 1)
    eventually(lambda: made.fleet.members and made.member.is_up)
    yield made
    made.close()


# ---- A picker after another ----


def test_picker_that_restarts_takes_no_server_away(tmp_path: Path) -> None:
    """Envoy has those that the one before wrote, until they tell another role or are gone."""
    first = Followed(tmp_path, 2)
    addresses = [mock.address for mock in first.mocks]
    eventually(lambda: read_members(tmp_path) == dict.fromkeys(addresses, "pool"))
    seen: list[dict[str, str]] = []
    try:
        first.mocks.run(first._close())
        seen.append(read_members(tmp_path))
        for mock in first.mocks:
            mock.costs = 500
        (tmp_path / "servers").write_text(f"{first.mocks[0].url}\n")
        first.fleet = first.mocks.run(first._start(str(tmp_path / "servers")))
        eventually(lambda: first.fleet.members.keys() == {addresses[0]})
        eventually(lambda: "answers 500" in first.member.problem)
        seen.append(read_members(tmp_path))
        first.server.costs = {"role": "decode", "bootstrap_port": None}
        eventually(lambda: read_members(tmp_path) == {addresses[0]: "decode"})
    finally:
        first.close()
    assert seen == [dict.fromkeys(addresses, "pool"), {addresses[0]: "pool"}]


@pytest.mark.parametrize("told", [OSError("gone"), []])
def test_picker_that_restarts_needs_no_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    """It knows those that Envoy has, and refuses nothing that Envoy would take without it."""
    num_read = 0

    def read_servings(*_: Any) -> Any:
        nonlocal num_read
        num_read += 1
        if told:
            raise told
        return told

    monkeypatch.setattr(membership, "read_servings", read_servings)
    monkeypatch.setattr(fleet, "RESOLVE_S", 0.0)
    first = Followed(tmp_path, 1)
    try:
        eventually(lambda: first.fleet.members and first.member.is_up)
        first.mocks.run(first._close())
        first.fleet = first.mocks.run(first._start("redis://127.0.0.1:1"))
        eventually(lambda: num_read > 2 and first.member.is_up)
        assert read_members(tmp_path) == {first.server.address: "pool"}
        first.mocks.run(first.server.die())
        if not told:
            eventually(lambda: not first.fleet.members)
    finally:
        first.close()


# ---- Answers that are none ----


class Endless:
    """Sends on, and counts."""

    num_sent = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while self.num_sent < 4 * ENOUGH_BYTES:
            await answer.write(b" " * (1 << 20))
            self.num_sent += 1 << 20
        return answer


def test_endless_answer_is_cut_off(followed: Followed) -> None:
    followed.server.costs = endless = Endless()
    eventually(lambda: "more than" in followed.member.problem)
    assert endless.num_sent < ENOUGH_BYTES


async def packed(_: web.Request) -> web.Response:
    body = gzip.compress(Mock().told())
    return web.Response(body=body, headers={"Content-Encoding": "gzip"})


async def elsewhere(_: web.Request) -> web.Response:
    raise web.HTTPFound("/ready")


async def tells_its_part(_: web.Request) -> web.Response:
    told = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}
    return web.json_response({"error": "no costs", **told}, status=404)


@pytest.mark.parametrize(
    ("costs", "info", "role", "problem"),
    [
        pytest.param(packed, None, "", "no answer of", id="it is not unpacked"),
        pytest.param(elsewhere, None, "", "answers 302", id="nobody sends the picker elsewhere"),
        pytest.param({"rank": 1 << 40}, None, "", "no answer of", id="nor counts it for ever"),
        pytest.param(401, None, "", "refuses the key; pass --server-key-file", id="a key"),
        pytest.param(500, None, "", "answers 500", id="a failure"),
        (tells_its_part, 401, "prefill", ""),
        (404, {"disaggregation_mode": "decode"}, "decode", ""),
        (404, {}, "", ""),
        (404, 404, "", ""),
        (404, 401, "", "does not say without a key which part it has"),
        (404, 503, "", "answers 503 to /server_info"),
    ],
)
def test_no_answer_leaves_out_no_costs_do_not(
    followed: Followed, costs: Any, info: Any, role: str, problem: str
) -> None:
    """A server without costs told some before its restart, of which neither price nor role is kept.
    A half that counts as a whole server is sent what it cannot answer."""
    followed.server.info, followed.server.costs = info, costs
    eventually(lambda: not followed.member.replicas or followed.member.problem)
    followed.wait_until_asked(2)
    assert problem in followed.member.problem and bool(problem) != followed.member.is_up
    assert followed.member.role == (role or "aggregated")
    assert followed.member.bootstrap_port == (8998 if role == "prefill" else None)
    assert bool(followed.server.paths) == (info is not None), "nothing else was asked"
    followed.server.costs = {}
    eventually(lambda: followed.member.is_up and followed.member.replicas)


def test_nonsense_about_events_is_tried_again(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sglang_tiered.route.fleet.EVENTS_AGAIN_S", 0.05)
    followed.server.events, followed.server.ranks = EventSource("\0", 1), (1,)
    eventually(lambda: caplog.text.count("cannot be followed") > 2)
    pages = followed.member.replicas[1].pages
    pages.store(DEVICE, [1])
    eventually(lambda: len(pages) == 0)
    assert followed.member.is_up


def test_half_without_its_other_takes_nothing(tmp_path: Path) -> None:
    """The readiness of the front and its alert go by that, or nobody hears of its 503s."""
    pair = Followed(tmp_path, 2)

    def usable() -> set[str]:
        return {one.address for one in pair.fleet.usable(pair.fleet._clock())}

    try:
        for role in ("prefill", "decode"):
            both = {mock.address for mock in pair.mocks}
            eventually(lambda both=both: usable() == both)
            pair.server.costs = {"role": role}
            eventually(lambda: usable() == {pair.mocks[1].address})
            pair.mocks[1].costs = {"role": role}
            eventually(lambda: not usable())
            pair.server.costs = {"role": ({"prefill", "decode"} - {role}).pop()}
            eventually(lambda both=both: usable() == both)
            for mock in pair.mocks:
                mock.costs = {}
    finally:
        pair.close()


# ---- Roles that are switched ----


def clusters_of(followed: Followed) -> set[str]:
    """Of Envoy, those that have the server."""
    address = str(followed.server.port)
    return {one for one in CLUSTERS if address in (followed.folder / f"{one}.json").read_text()}


@pytest.mark.parametrize("tells_costs", [True, False])
def test_switched_role_moves_a_server(followed: Followed, tells_costs: bool) -> None:
    """To the other cluster of Envoy; until it has switched, it drains."""

    async def part(_: web.Request) -> web.Response:
        told = {"disaggregation_mode": role, "draining": drains}
        port = {"disaggregation_bootstrap_port": 8998}
        return web.json_response({"error": "no costs", **told, **port}, status=404)

    drains = False
    for role in ("prefill", "decode", "prefill"):
        port = 8998 if role == "prefill" or not tells_costs else None
        followed.server.costs = {"role": role, "bootstrap_port": port} if tells_costs else part
        eventually(lambda role=role: clusters_of(followed) == {role})
        assert followed.member.bootstrap_port == port
        followed.server.is_draining = drains = True
        eventually(lambda: followed.member.is_draining)
        assert not followed.member.is_ready(followed.fleet._clock())
        followed.server.is_draining = drains = False
        eventually(lambda: followed.member.is_ready(followed.fleet._clock()))


# ---- What counts ----


def test_replica_that_returns_is_asked_on(followed: Followed) -> None:
    for ranks in ((0, 1), (1,), (0, 1), (1, 1), (0,)):
        followed.server.ranks = ranks
        eventually(lambda ranks=ranks: set(followed.member.replicas) == set(ranks))
    followed.wait_until_asked()


def test_server_that_restarts_inherits_nothing(followed: Followed) -> None:
    """Neither pages nor what was learnt of its answers; while it runs both stay."""
    eventually(lambda: 0 in followed.member.replicas)
    first = followed.member.replicas[0]
    first.pages.store(DEVICE, [1])
    followed.server.costs = {"running_prefill_s": 600.0}
    eventually(lambda: first.state.queue_s(followed.fleet._clock()) > 500)
    assert followed.member.replicas[0] is first and len(first.pages) == 1
    followed.server.costs = {"boot": "ff"}
    eventually(lambda: followed.member.boot == "ff")
    heir = followed.member.replicas[0]
    assert heir is not first and len(heir.pages) == 0
    assert heir.state.queue_s(followed.fleet._clock()) < 1


def test_servers_learn_no_operators_key(followed: Followed) -> None:
    """Who takes the address of one, or can name it, would have what purges the others."""
    followed.server.costs = 404
    followed.wait_until_asked()
    assert {"/server_info", "/ready"} <= set(followed.server.paths), "which want none at all"
    keys = {one["authorization"] for one in followed.server.asked}
    assert keys == {f"Bearer {costs_key('secret')}"} != {"Bearer secret"}


def test_server_that_has_moved_is_not_kept(followed: Followed) -> None:
    fleet, server = followed.fleet, followed.server
    assert fleet._forgotten({}) == {server.address: server.url}
    assert fleet._forgotten({"192.0.2.1:80": server.url}) == {}


def test_slow_answers_leave_a_server_ready(followed: Followed) -> None:
    """At overload the process that tells costs is busy with prompts."""

    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(1.2)
        return web.Response(body=followed.server.told())

    followed.server.costs = slow
    asked = len(followed.server.asked)

    def is_over() -> bool:
        assert followed.member.is_ready(followed.fleet._clock())
        return len(followed.server.asked) >= asked + 4

    eventually(is_over)


def test_refused_connection_is_believed_at_once(followed: Followed) -> None:
    followed.member.url = "http://127.0.0.1:1"
    eventually(lambda: not followed.member.is_up)
    assert followed.member.problem.startswith("does not answer")


def test_emptied_file_takes_no_server_away(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    """An editor writes it anew in two steps; without servers every request fails."""
    (followed.folder / "servers").write_text("")
    eventually(lambda: "the servers stay as they are" in caplog.text)
    assert followed.member.is_up


def test_redis_that_fails_takes_no_server_away(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that forgot. What it does not name goes once it is down."""
    told: list[Any] = [OSError("gone")]
    num_read = 0

    def read_servings(*_: Any) -> Any:
        nonlocal num_read
        num_read += 1
        if isinstance(told[-1], OSError):
            raise told[-1]
        return told[-1]

    monkeypatch.setattr(membership, "read_servings", read_servings)
    monkeypatch.setattr(fleet, "RESOLVE_S", 0.0)
    followed.fleet._source = Source("redis://127.0.0.1:1")
    for said in (told[0], []):
        told.append(said)
        seen = num_read
        eventually(lambda seen=seen: num_read > seen + 2)
        assert followed.member.is_up
    followed.mocks.run(followed.server.die())
    eventually(lambda: not followed.fleet.members)


def test_unwritable_folder_ends_no_asking(followed: Followed) -> None:
    aside = followed.folder.with_name("aside")
    followed.folder.rename(aside)
    followed.folder.write_text("no folder")
    followed.server.costs = {"role": "prefill"}
    eventually(lambda: followed.member.role == "prefill")
    followed.wait_until_asked(3)
    followed.folder.unlink()
    aside.rename(followed.folder)
    eventually(lambda: clusters_of(followed) == {"prefill"})
