"""Roles follow measured load, one server at a time, and stay where it stays."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kit.cost_records import record_of
from sglang_tiered.policy.balance import HALVES, HOLDS, RoleBalance, RoleSwitch
from sglang_tiered.policy.cost_model import CostModel, PrefillCost
from sglang_tiered.policy.server_costs import DecodeLoad, RankCosts, Room, Waiting

MODEL = CostModel(page_tokens=64, bytes_per_token=1, prefill=PrefillCost((1e-3, 1e-4, 1e-9)))
COOLDOWN_S = 30.0
BATCH = 1000
"""Requests that a decode server has room for; a step takes as long for one as for all."""


def prefill(busy: float, **more: Any) -> list[RankCosts]:
    return [record_of(MODEL, role="prefill", busy=busy, **more)]


def decode(load: float, **more: Any) -> list[RankCosts]:
    running = round(load * BATCH)
    steps = DecodeLoad(running, BATCH, (100, 100, 1e6, 100, 1e6, 100), running)
    return [record_of(MODEL, **{"role": "decode", "decode": steps, "device": ROOM, **more})]


ROOM = Room(0, 100 * BATCH)
KNOWN = {
    role: [make(part / 200) for part in range(201)]
    for role, make in (("prefill", prefill), ("decode", decode))
}
"""Records of servers that are busy for so many parts of 200."""


def balance(floor: int = 1, tpot_s: float = 0.1, cooldown_s: float = COOLDOWN_S) -> RoleBalance:
    return RoleBalance(cooldown_s=cooldown_s, floor=floor, tpot_s=tpot_s)


def watch(
    policy: RoleBalance, servers: dict[Any, list[RankCosts]], for_s: float
) -> RoleSwitch | None:
    """Look every second, as long as nothing switches."""
    switches = (policy.look(float(now), servers) for now in range(int(for_s) + 1))
    return next((one for one in switches if one is not None), None)


# ---- What it decides ----


@pytest.mark.parametrize(
    ("loads", "floor", "why", "role"),
    [
        pytest.param([0.9, 0.9, 0.3, 0.3], 1, "", "prefill", id="prefill is short of servers"),
        pytest.param([0.3, 0.3, 0.9, 0.9], 1, "", "decode", id="decode is"),
        pytest.param([0.9, 0.9, 0.3, 0.3], 2, "balanced", None, id="none below its floor"),
        pytest.param([0.9, 0.9, 0.3, 0.3], 3, "floor", None, id="it is already"),
        pytest.param([0.4, 0.4, 0.0, 0.0], 1, "calm", None, id="nobody has much to do"),
        pytest.param([0.9, 0.9, 0.8, 0.8], 1, "balanced", None, id="both do"),
        pytest.param([0.9, 0.9, 0.0, 0.0], 1, "", "prefill", id="one has nothing to do"),
        pytest.param([0.4], 1, "floor", None, id="there is nobody else"),
    ],
)
def test_the_role_that_is_short_gets_one(
    loads: list[float], floor: int, why: str, role: str | None
) -> None:
    servers = {n: (prefill if n < 2 else decode)(load) for n, load in enumerate(loads)}
    policy = balance(floor)
    assert watch(policy, servers, COOLDOWN_S - 1) is None
    assert policy.why == ("floor" if why == "floor" else "measuring")
    switch = watch(policy, servers, 3 * COOLDOWN_S)
    assert policy.why == (why or "switching") and policy.why in HOLDS
    assert (switch and switch.role) == role


def test_the_emptiest_server_gives_its_role_up() -> None:
    servers: dict[Any, list[RankCosts]] = {"a": prefill(0.9), "b": prefill(0.9)}
    servers |= {"full": decode(0.3), "empty": decode(0.1), "half": decode(0.2)}
    servers |= {"asked": decode(0.1, waiting=Waiting(50, 0))}
    switch = watch(balance(), servers, COOLDOWN_S)
    assert switch and switch.server == "empty"
    servers = {"a": decode(0.9), "late": prefill(0.1, queue_wait_s=2.0), "idle": prefill(0.1)}
    switch = watch(balance(), servers, COOLDOWN_S)
    assert switch and switch.server == "idle"


def test_who_may_be_dead_keeps_no_floor() -> None:
    """Of two that decode one is late with its costs: the other is not taken away. Nor is it asked
    itself, whoever else refused before."""
    servers = {"a": prefill(0.9), "b": decode(0.1), "late": decode(0.2)}
    policy = balance()
    for now in range(2 * int(COOLDOWN_S)):
        assert policy.look(now, servers, {"late"}) is None
    assert policy.why == "floor"
    servers["c"] = decode(0.1)
    for server in "bcbc":
        until = (now := now + 1) + 40 * int(COOLDOWN_S)
        switch = None
        while switch is None and now < until:
            switch, now = policy.look(now, servers, {"late"}), now + 1
        assert switch and switch.server == server
        policy.ended(switch, now, switched=False, again=True)


@pytest.mark.parametrize(
    ("hung", "others", "role", "why"),
    [
        (prefill(0.0, age_s=11.0), "bc", "prefill", ""),
        (decode(0.0, age_s=11.0), "b", None, ""),  # of two that decode the other stays
        # A slow server tells nothing while it computes what it said that it would.
        (prefill(1.0, age_s=49.0, running_prefill_s=40.0), "bc", "prefill", "1.90 of 2"),
        (prefill(1.0, age_s=51.0, running_prefill_s=40.0), "bc", "prefill", "0.90 of 1"),
    ],
)
def test_a_hung_scheduler_is_no_server(
    hung: list[RankCosts], others: str, role: str | None, why: str
) -> None:
    """Behind HTTP that answers: it does not work."""
    servers = {"a": prefill(0.9), "hung": hung, **{one: decode(0.1) for one in others}}
    switch = watch(balance(), servers, 2 * COOLDOWN_S)
    assert (switch and switch.role) == role
    assert switch is None or f"has work for {why}" in switch.reason


@pytest.mark.parametrize("half", HALVES)
def test_a_role_below_its_floor_gets_a_server(half: str) -> None:
    """Even if nobody of it is left, and whatever the load."""
    make, other = (prefill, decode) if half == "prefill" else (decode, prefill)
    servers: dict[Any, list[RankCosts]] = {"a": make(0.1), "c": other(0.2)}
    servers |= {one: other(0.2, waiting=Waiting(50, 0)) for one in "bd"}
    for floor, there in ((2, servers), (1, {one: servers[one] for one in "bcd"})):
        policy = balance(floor)
        assert watch(policy, there, COOLDOWN_S - 1) is None and policy.why == "measuring"
        switch = watch(policy, there, 2 * COOLDOWN_S)
        assert switch and (switch.server, switch.role) == ("c", half)
        assert policy.loads[HALVES.index(half)] == pytest.approx(0.1 if "a" in there else 0.0)


def test_each_refusal_doubles_the_time_to_the_next() -> None:
    """Servers take nothing new while they drain in vain. One that switches ends that, and one that
    never can costs no time."""
    servers = {"a": prefill(0.9), **{one: decode(0.1) for one in "bcd"}}
    policy, orders, ended_s = balance(), [], 0
    for now in range(200 * int(COOLDOWN_S)):
        switch = policy.look(now, servers)
        if switch is not None:
            orders.append(now - ended_s)
            policy.ended(switch, now, switched=len(orders) == 9, again=len(orders) != 1)
            ended_s = now
        if len(orders) == 10:
            break
    times = [COOLDOWN_S * 2**number for number in (0, 0, 1, 2, 3, 4, 5, 5, 5, 0)]
    assert orders == pytest.approx(times, abs=2)


def test_prefill_that_waits_for_loads_gives_nobody() -> None:
    """It computes little, and a server less would leave it fewer disks."""
    idle = {n: prefill(0.1, queue_wait_s=2.0, ahead_tokens=(5000, 0, 0)) for n in range(3)}
    busy = {n: decode(0.9) for n in (7, 8)}
    policy = balance()
    assert watch(policy, idle | busy, 3 * COOLDOWN_S) is None and policy.why == "loading"
    for more in ({"queue_wait_s": 2.0}, {"ahead_tokens": (5000, 0, 0)}):
        idle = {n: prefill(0.1, **more) for n in range(3)}
        assert watch(balance(), idle | busy, 3 * COOLDOWN_S) is not None, "decode may be why"


def test_steps_never_in_time_are_no_load() -> None:
    """Steps take 25 ms with one request as with all, and 20 ms is wanted."""
    servers = timed_servers((10, 1000, 10), (0, 10_000), lambda b: 0.025)
    policy = balance(tpot_s=0.02)
    for now in range(3 * int(COOLDOWN_S)):
        assert policy.look(now, servers(now)) is None
    assert policy.why == "slow"


@pytest.mark.parametrize("loads", [(0.5, 0.2, 0.2, 0.2), (0.6, 0.6, 0.5, 0.5)])
def test_a_server_missed_once_moves_nobody(loads: tuple[float, ...]) -> None:
    """Roles that look short of a server for one second, by what all had to do in a minute."""
    number = 1 if len({*loads[1:]}) == 1 else 2
    servers = {n: (prefill if n < number else decode)(load) for n, load in enumerate(loads)}
    policy = balance()
    for now in range(5 * int(COOLDOWN_S)):
        is_missed = now == 3 * int(COOLDOWN_S)
        there = {one: record for one, record in servers.items() if one or not is_missed}
        assert policy.look(now, there) is None
        assert not is_missed or policy.why in ("measuring", "floor")


def timed_servers(
    decoding: tuple[int, int, int | None], room: tuple[int, int], step_s: Callable[[int], float]
) -> Callable[[float], dict[Any, list[RankCosts]]]:
    """One that prefills, and one that decodes, after so many seconds: batches of one request and of
    ten in turn."""
    running, most, tokens = decoding

    def servers(now_s: float) -> dict[Any, list[RankCosts]]:
        sums = [0.0] * 6
        for batch in (1, 10):
            one_us = 1e6 * step_s(batch)
            step = (1, batch, one_us, batch * batch, batch * one_us, batch)
            sums = [total + 20 * now_s * more for total, more in zip(sums, step, strict=True)]
        steps = DecodeLoad(running, most, tuple(sums), tokens)  # type: ignore[arg-type]
        return {"a": prefill(0.5), "b": decode(0, decode=steps, device=Room(*room))}

    return servers


@pytest.mark.parametrize(
    ("decoding", "room", "tpot_s", "load"),
    [
        pytest.param((10, 100, 5_000), (10_000, 10_000), 1.0, 0.5, id="what waits for its prefill"),
        pytest.param((10, 100, None), (8_000, 10_000), 1.0, 0.8, id="an earlier server's"),
        pytest.param((10, 20, 100), (100, 10_000), 1.0, 0.5, id="its limit of requests"),
        pytest.param((10, 100, 10), (10, 10_000), 0.03, 10 / 0.02 * 0.03 / 20, id="of a step"),
        pytest.param((0, 100, 0), (10_000, 10_000), 1.0, 0.0, id="nothing runs"),
    ],
)
def test_decode_is_as_full_as_its_batch(
    decoding: tuple[int, int, int | None], room: tuple[int, int], tpot_s: float, load: float
) -> None:
    """Memory that is held for what is not decoded yet is prefill's load. A step takes 10 ms, and
    one for each request in it."""
    is_timed = tpot_s < 1
    servers = timed_servers(decoding, room, lambda b: 0.01 + 0.001 * b * is_timed)
    policy = balance(tpot_s=tpot_s)
    for now in range(int(COOLDOWN_S) + 1):
        policy.look(now, servers(now))
    assert policy.loads[1] == pytest.approx(load, rel=0.05)


def test_who_tells_no_costs_stops_it() -> None:
    policy = balance()
    servers = {"a": prefill(0.9), "b": decode(0.1), "c": decode(0.1)}
    assert watch(policy, {**servers, "d": []}, 3 * COOLDOWN_S) is None
    assert policy.why == "unmeasured"
    orders = [policy.look(100.0 + now, servers) for now in range(int(COOLDOWN_S) + 1)]
    assert [one is not None for one in orders] == [False] * int(COOLDOWN_S) + [True]


def test_a_cpu_server_keeps_its_role() -> None:
    """A server of each role is not worth the other's there."""
    servers = {"a": prefill(0.1, computes_on="cpu"), "b": prefill(0.9, computes_on="cuda")}
    servers |= {"c": decode(0.1, computes_on="cuda"), "d": decode(0.1, computes_on="cuda")}
    policy = balance()
    assert watch(policy, servers, 3 * COOLDOWN_S) is None and policy.why == "mixed"


# ---- What it never does ----


@pytest.mark.parametrize("floor", [1, 2, 3])
def test_any_load_leaves_floors_and_times_kept(floor: int) -> None:
    orders = sum(drawn_orders(floor, seed) for seed in range(10))
    assert orders > 20


def drawn_orders(floor: int, seed: int) -> int:
    """Return how many there were in ten minutes, of loads and answers that are drawn."""
    draw, orders = random.Random(seed), 0
    numbers = draw.randint(1, 6), draw.randint(1, 6)
    roles = dict(enumerate(["prefill"] * numbers[0] + ["decode"] * numbers[1]))
    policy, switch, given_up = balance(floor), None, set()
    ended_s, until_s, busy = 0.0, 0.0, {}
    for now in range(600):
        if switch is not None and now >= until_s:
            switched, again = draw.choice([(True, True), (False, True), (False, False)])
            if switched:
                roles[switch.server] = switch.role
            if not again:
                given_up.add(switch.server)
            policy.ended(switch, now, switched=switched, again=again)
            switch, ended_s = None, now
        if now % 100 == 0:
            busy = {role: draw.choice(known) for role, known in KNOWN.items()}
        servers = {
            one: busy[role]
            for one, role in roles.items()
            if (switch is None or one != switch.server) and draw.random() > 0.001
        }
        late = {one for one in servers if draw.random() < 0.05}
        order = policy.look(now, servers, late, is_switching=switch is not None)
        if order is None:
            continue
        assert switch is None, "two at once"
        assert order.server not in late
        assert now - ended_s >= COOLDOWN_S
        assert order.server not in given_up
        staying = [one for one in servers if roles[one] == roles[order.server] and one not in late]
        assert len({*staying} - {order.server}) >= floor
        assert order.role != roles[order.server] and order.reason
        switch, until_s, orders = order, now + draw.randrange(20), orders + 1
    return orders


class Tandem:
    """What servers do at a load of so many of each role, that has just begun. Decode has no more to
    do than prefill handed over in the last ``answer_s``; ``waits``: where decode is full prefill
    waits for it, as a real one does."""

    def __init__(self, loads: tuple[float, float], *, answer_s: int = 0, waits: bool) -> None:
        self._loads, self._waits = loads, waits
        self._flows = deque([0.0] * answer_s, answer_s + 1)

    def second(self, counts: tuple[int, int]) -> dict[str, float]:
        """How busy a server of each role is in the next one."""
        (prefills, decodes), (num_prefill, num_decode) = self._loads, counts
        flow = min(1.0, num_prefill / prefills if prefills else 1.0)
        held = decodes * sum(self._flows) / len(self._flows) if self._flows else 0.0
        if self._waits and held >= num_decode:
            flow = min(flow, num_decode / decodes)
        self._flows.append(flow)
        held = decodes * sum(self._flows) / len(self._flows)
        return {"prefill": prefills * flow / num_prefill, "decode": min(1.0, held / num_decode)}


@settings(max_examples=60)
@given(
    loads=st.tuples(st.floats(0, 12), st.floats(0, 12)),
    counts=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    answer_s=st.integers(0, int(1.5 * COOLDOWN_S)),
    waits=st.booleans(),
)
@example(loads=(2.6, 2.6), counts=(3, 3), answer_s=int(1.5 * COOLDOWN_S), waits=False)
def test_constant_load_is_never_switched_back(
    loads: tuple[float, float], counts: tuple[int, int], answer_s: int, waits: bool
) -> None:
    """Nor is too much of it; nor while its first answers have not ended."""
    draw, taken = random.Random(1), dict[int, str]()
    roles = dict(enumerate(["prefill"] * counts[0] + ["decode"] * counts[1]))
    policy, tandem = balance(), Tandem(loads, answer_s=answer_s, waits=waits)
    for now in range(25 * int(COOLDOWN_S)):
        busy = tandem.second((count_of(roles, "prefill"), count_of(roles, "decode")))
        if role := follow(policy, roles, now, busy, lambda: draw.uniform(0.95, 1.05)):
            taken[now] = role
    assert len(set(taken.values())) <= 1
    assert max(taken, default=0) < 20 * COOLDOWN_S, "it has come to rest"
    assert policy.why in ("calm", "balanced")


def test_each_change_back_waits_twice_as_long() -> None:
    """Loads that turn with every order; one that is turned long after counts anew."""
    policy, times, now = balance(), list[float](), 0
    roles = dict(enumerate(["prefill", "prefill", "decode", "decode"]))
    while len(times) < 7:
        short = "prefill" if len(times) % 2 else "decode"
        role = follow(policy, roles, now, {one: 0.9 if one == short else 0.1 for one in HALVES})
        if role is not None:
            assert role == short
            times.append(now)
            now += 300 * int(COOLDOWN_S) if len(times) == 5 else 0
        now += 1
    waits = [(after - before) / COOLDOWN_S for before, after in itertools.pairwise(times)]
    assert waits == pytest.approx([1, 2, 4, 8, 301, 1], abs=0.2)


def count_of(roles: dict[int, str], role: str) -> int:
    return list(roles.values()).count(role)


def follow(
    policy: RoleBalance,
    roles: dict[int, str],
    now: int,
    busy: dict[str, float],
    noise: Callable[[], float] = lambda: 1.0,
) -> str | None:
    """Look once, at servers as busy as those of their role; who is asked takes its new role."""
    servers = {
        one: KNOWN[role][min(200, round(200 * busy[role] * noise()))] for one, role in roles.items()
    }
    switch = policy.look(now, servers)
    if switch is None:
        return None
    roles[switch.server] = switch.role
    policy.ended(switch, now, switched=True, again=True)
    return switch.role
