"""Which server a request goes to: the one by which it is answered soonest, in seconds.

A server tells its prices (prefill, and loads from each tier below host memory) and its queue; an
index tells what each holds of the prompt. The same ``CostModel.plan`` that the server will run
says what of that is worth loading, so a tier that computing outruns attracts nothing. The rule is
that of Mooncake's conductor (Qin et al., FAST 2025, Algorithm 1): queue, transfer and prefill, the
least sum wins. Added are prices learnt per tier, and a charge for the work that those behind will
find.

    score = slowdown * (queue + batch + wait for loads + prefill of the rest) + charge * idle.

``idle`` is the same sum on an empty queue. ``charge`` is the number of requests that it delays:
those that come before the queue is empty again. With Poisson arrivals they are
``busy / (1 - busy) * (1 + queue / service)`` (M/G/1: what a busy period lasts for the work that it
began with). Without the charge each request takes the shortest queue, and hits are lost when they
count most.

Every term is the least over the plans' lengths of a sum that no load and no price lowers. So a
request that was sent to a server, more load or a slower tier never lower its score. A server's own
plan is another one where its prefill holds up others: it may take a quarter longer than the least,
and a longer queue may shorten it. So what is expected of the server comes from that plan, and the
score from the least.

Pure: seconds and tokens in, decisions out; random numbers are passed in. Not thread-safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sglang_tiered.policy.cost_model import MIN_GAIN, LoadPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang_tiered.policy.server_costs import RankCosts


MAX_CHARGE = 4.0
"""The most that ``busy / (1 - busy)`` counts: of a server that is always busy nothing is known but
that."""

SLOWDOWN_GAIN, SLOWDOWN_MOST = 0.05, 4.0
"""Weight of an answer in what is learnt of a server beyond its prices, and the most that is."""

MIN_SERVICE_S = 1e-6
"""A smaller mean work of requests is none that was measured."""

SILENCE_S = 1.0
"""How long a server is taken to work off its queue without a report: several would have come."""

TIE_S = 5e-3
TIE_SHARE = 0.05
"""Scores this close are equal: predictions are not better than that."""


MAX_RETRY_S = 60

MICROSECOND = 1e-6

Server = TypeVar("Server")
"""However the caller tells servers apart."""


@dataclass(frozen=True, slots=True)
class Held:
    """Tokens of a prompt by the tier that holds them, in prefix order. ``host`` counts what lies
    beyond ``device``, and ``nvme`` what lies beyond both. ``peer`` counts what only other servers'
    NVMe and ``object`` what only a bucket holds beyond that."""

    device: int = 0
    host: int = 0
    nvme: int = 0
    peer: int = 0
    object: int = 0

    @property
    def num_loadable(self) -> int:
        """Tokens below host memory."""
        return self.nvme + self.peer + self.object


NOTHING_HELD = Held()


@dataclass(slots=True)
class DecodeState:
    """What the router knows of a server that decodes. A step takes ``prices`` of: one, each
    request in it."""

    prices: tuple[float, float] = (0.0, 0.0)
    max_tokens: int = 1  # of keys and values that fit
    num_running: int = 0  # or about to, once they are handed over
    num_tokens: int = 0  # of what runs, at its end
    sent: list[tuple[float, int]] = field(default_factory=list)
    """When requests were sent that no record contains, and their tokens at their end."""

    def reserve(self, now_s: float, num_tokens: int) -> None:
        """Count a request that was sent and is not in a record yet."""
        self.num_running += 1
        self.num_tokens += num_tokens
        self.sent.append((now_s, num_tokens))

    def report(self, record: RankCosts, now_s: float) -> None:
        """Take in a record. What was sent since its snapshot comes on top."""
        self.prices = step_prices(record.decode.moments)
        self.max_tokens = max(1, record.device.capacity_tokens)
        self.sent = [one for one in self.sent if one[0] > now_s - record.age_s]
        self.num_running = record.decode.requests + record.waiting.requests + len(self.sent)
        self.num_tokens = record.device.held_tokens + sum(tokens for _, tokens in self.sent)

    @property
    def next_step_s(self) -> float:
        """Return the time of a step with one more request."""
        fixed, per_request = self.prices
        return fixed + per_request * (self.num_running + 1)


class ServerState:
    """What a router knows of a server by its cost records, and by nothing else. Each data-parallel
    replica is a server of its own here. The simulated router and a real one both hear of servers in
    this way only.

    ``free_s`` is when its queue is expected to be empty, on the caller's clock: what it reported
    last, and the work that was sent since. At ``silent_s`` it will have been silent for too long.
    ``num_others`` are the requests that a prefill holds up, ``slowdown`` is the learnt quotient of
    seen and predicted times to the first token. ``sent`` tells when work was sent that
    no record contains, and the seconds of it."""

    def __init__(self, record: RankCosts, now_s: float) -> None:
        self.slowdown = 1.0
        self.sent: list[tuple[float, float]] = []
        self.decode = DecodeState()
        self.report(record, now_s)

    def report(self, record: RankCosts, now_s: float) -> None:
        """Take in a record, answered at ``now_s``. What was learnt of the server's answers stays.
        What was sent since its snapshot comes on top of its queue beside the prefill that ran then,
        and of what is left of that by now."""
        self.record, self.costs = record, record.cost_model()
        self.sent = [one for one in self.sent if one[0] > now_s - record.age_s]
        self.free_s = now_s + record.wait_s() + sum(seconds for _, seconds in self.sent)
        self.silent_s = now_s + max(SILENCE_S, record.left_s)
        self.num_others = record.num_others + len(self.sent)
        self.decode.report(record, now_s)

    def queue_s(self, now_s: float) -> float:
        """Return the work ahead of a request that comes now."""
        return max(0.0, self.free_s - min(now_s, self.silent_s))

    def reserve(self, now_s: float, seconds: float) -> None:
        """Count a request that was sent and is not in a record yet. Its score is higher for it, or
        the same, whatever comes next."""
        self.free_s = max(self.free_s, min(now_s, self.silent_s)) + seconds
        self.num_others += 1
        self.sent.append((now_s, seconds))

    def answered(self, predicted_s: float, seen_s: float) -> None:
        """Learn what no price knows from a first token."""
        if predicted_s > 0:
            seen = self.slowdown * seen_s / predicted_s
            seen = min(SLOWDOWN_MOST, max(1 / SLOWDOWN_MOST, seen))
            self.slowdown += SLOWDOWN_GAIN * (seen - self.slowdown)


@dataclass(frozen=True, slots=True)
class Estimate:
    """By the server's own plan ``ttft_s`` is the expected time to the first token. ``work_s`` is
    the prefill that the request adds to the server, and ``loaded`` the tokens that it loads."""

    score_s: float
    ttft_s: float
    work_s: float
    loaded: int


def _num_delayed(state: ServerState, queue_s: float) -> float:
    """Return the number of requests that work at the end of a queue delays, on average."""
    busy, service_s = state.record.busy, state.record.service_s
    odds = MAX_CHARGE if busy >= 1 else min(MAX_CHARGE, busy / (1 - busy))
    return odds if service_s < MIN_SERVICE_S else odds * (1 + queue_s / service_s)


class _Priced(NamedTuple):
    """A prompt at the prices of one server: without its queue, and without loads under way."""

    new: int
    before: int
    fixed_s: float
    compute_s: float  # of all that neither device nor host memory holds
    least_s: float  # the same with every load for nothing
    idle_s: float  # the best plan, waits for loads included


def _price(state: ServerState, held: Held, num_tokens: int) -> _Priced:
    costs = state.costs
    before = min(held.device + held.host, num_tokens - 1)
    new = num_tokens - before
    compute_s = costs.prefill.seconds(new, before)
    fixed_s = costs.prefill.prices[0] + held.host * state.record.prefill.prices[3]
    least_s = idle_s = compute_s
    if held.num_loadable:
        saved_s = costs.prefill.saved_seconds(min(held.num_loadable, new), new, before)
        least_s = max(0.0, compute_s - max(0.0, saved_s))
        idle_s = _plan(state, held, new, before, compute_s, (), 0.0).least_s
    return _Priced(new, before, fixed_s, compute_s, least_s, idle_s)


def _plan(
    state: ServerState,
    held: Held,
    new: int,
    before: int,
    compute_s: float,
    ahead: Sequence[int],
    queue_s: float,
) -> LoadPlan:
    """Return the plan that the server will make."""
    costs = state.costs
    parts = (held.nvme, held.peer, held.object)
    if state.record.always_loads:
        load_s = costs.load_seconds(parts, ahead)
        saved_s = costs.prefill.saved_seconds(min(held.num_loadable, new), new, before)
        least_s = max(0.0, load_s - queue_s) + compute_s - (1 - MIN_GAIN) * saved_s
        return LoadPlan(parts, load_s, saved_s, least_s)
    return costs.plan(
        num_held=held.num_loadable,
        num_new=new,
        num_before=before,
        ahead=ahead,
        queue_wait_s=queue_s,
        num_others=state.num_others,
        spans=tuple(enumerate(parts)),
    )


def estimate(
    state: ServerState,
    held: Held,
    num_tokens: int,
    now_s: float,
    charge: float = 1.0,
    priced: _Priced | None = None,
) -> Estimate:
    """Price a prompt of ``num_tokens`` at one server. ``charge`` scales what is charged for work:
    0 is greedy."""
    new, before, fixed_s, compute_s, _, idle_s = priced or _price(state, held, num_tokens)
    queue_s = state.queue_s(now_s)
    batch_s = state.costs.prefill.prices[0]
    plan = LoadPlan((), 0.0, 0.0, compute_s)
    if held.num_loadable:
        plan = _plan(state, held, new, before, compute_s, state.record.ahead_tokens, queue_s)
    # As ``plan`` compares: only so is the least of all lengths a sum that no load lowers.
    total_s = max(plan.load_s, queue_s) + compute_s - (1 - MIN_GAIN) * plan.saved_s
    score_s = state.slowdown * (queue_s + plan.least_s + fixed_s)
    score_s += charge * _num_delayed(state, queue_s) * (idle_s + fixed_s)
    ttft_s = state.slowdown * (total_s + fixed_s)
    return Estimate(
        _or_infinite(score_s), ttft_s, compute_s - plan.saved_s + batch_s, plan.num_tokens
    )


def _or_infinite(seconds: float) -> float:
    """Return infinity for what is no number: whose score it is comes last, and is no candidate
    less."""
    return seconds if seconds < math.inf else math.inf


def choose_server(
    states: Mapping[Server, ServerState],
    held: Mapping[Server, Held],
    num_tokens: int,
    now_s: float,
    *,
    elsewhere: Held = NOTHING_HELD,
    charge: float = 1.0,
    draw: Callable[[], float],
) -> tuple[Server, Estimate]:
    """Choose one of some servers, at least one, for a prompt.

    ``held`` is what each server holds, ``elsewhere`` what every server not in it can fetch from
    others. ``draw`` returns random numbers from 0 to 1. Among scores that are about equal two are
    drawn at random, and of these the one that loads less, then the one that answers sooner.

    Servers are planned for in order of a bound below their score, until no bound is in reach:
    of many servers that hold nothing, those with the shortest queues.
    """
    found: list[tuple[Server, Estimate]] = []
    reach = math.inf
    for bound, server, mine, priced in _bounds(states, held, num_tokens, now_s, elsewhere, charge):
        if bound > reach:
            break
        one = estimate(states[server], mine, num_tokens, now_s, charge, priced)
        found.append((server, one))
        reach = min(reach, one.score_s + max(TIE_S, TIE_SHARE * one.score_s))
    equal = [(server, one) for server, one in found if one.score_s <= reach]
    drawn = [equal[int(draw() * len(equal))] for _ in range(2)]
    return min(drawn, key=lambda item: (item[1].loaded, item[1].ttft_s))


def least_ttft(
    states: Mapping[Server, ServerState],
    held: Mapping[Server, Held],
    num_tokens: int,
    now_s: float,
    *,
    elsewhere: Held = NOTHING_HELD,
) -> float:
    """Return the least time to the first token that a server promises; infinite without any."""
    least_s = math.inf
    for bound, server, mine, priced in _bounds(states, held, num_tokens, now_s, elsewhere, 0.0):
        if bound >= least_s:
            break
        one = estimate(states[server], mine, num_tokens, now_s, 0.0, priced)
        least_s = min(least_s, one.ttft_s)
    return least_s


def _bounds(
    states: Mapping[Server, ServerState],
    held: Mapping[Server, Held],
    num_tokens: int,
    now_s: float,
    elsewhere: Held,
    charge: float,
) -> list[tuple[float, Server, Held, _Priced]]:
    """Return the servers by a bound below their score and, without a charge, below their time to
    the first token."""
    bounds: list[tuple[float, Server, Held, _Priced]] = []
    known: dict[tuple[int, bool, float, Held], _Priced] = {}
    for server, state in states.items():
        mine, record = held.get(server, elsewhere), state.record
        key = (id(state.costs), record.always_loads, record.prefill.prices[3], mine)
        priced = known.get(key)
        if priced is None:
            priced = known[key] = _price(state, mine, num_tokens)
        queue_s = state.queue_s(now_s)
        total_s = max(queue_s + priced.least_s, priced.idle_s)
        bound = state.slowdown * (total_s + priced.fixed_s)
        bound += charge * _num_delayed(state, queue_s) * (priced.idle_s + priced.fixed_s)
        bounds.append((_or_infinite(bound), server, mine, priced))
    bounds.sort(key=itemgetter(0))
    return bounds


def choose_decode(
    states: Mapping[Server, DecodeState],
    num_tokens: int,
    max_new: int,
    *,
    tpot_s: float = math.inf,
    draw: Callable[[], float],
) -> Server:
    """Choose where a prompt that was computed elsewhere is decoded, of at least one server.

    Of the servers with room for ``num_tokens + max_new`` and a step within ``tpot_s`` the one that
    steps fastest. If none has room or is fast enough, the one that is least full.
    """
    need = num_tokens + max_new
    keys: dict[Server, tuple[float, float]] = {}
    for server, state in states.items():
        fill = (state.num_tokens + need) / state.max_tokens
        step_s = state.next_step_s
        keys[server] = (0.0, step_s) if fill <= 1 and step_s <= tpot_s else (1.0, fill)
    rank, least = min(keys.values())
    equal = [one for one, key in keys.items() if key[0] == rank and key[1] <= least * 1.001]
    return equal[int(draw() * len(equal))]


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests that are alike refused at overload, where their first token is predicted to come too
    late: after ``limit_s``, None without a limit. ``priority`` goes to SGLang, None to leave it.
    ``is_sheddable``: whether requests may be refused."""

    name: str
    limit_s: float | None = None
    priority: int | None = None
    is_sheddable: bool = True


def retry_after_s(limit_s: float, predicted_s: float, least_queue_s: float) -> int | None:
    """Return in how many seconds a request is to come again, by when the shortest queue will have
    shrunk enough; None to admit. ``predicted_s`` is the least time to the first token of all
    servers.

    A prediction may be wrong, so a request is refused only while every server has work, which costs
    little (``docs/routing.md``).
    """
    if predicted_s <= limit_s or least_queue_s <= 0:
        return None
    late_s = min(predicted_s - limit_s, least_queue_s, MAX_RETRY_S)
    return max(1, math.ceil(late_s))


def step_prices(moments: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of a decode step, and per request in it, by least squares over the steps
    that are summed up. What a token of keys and values adds is in the price per request."""
    steps, requests, microseconds, squares, products, _ = moments
    if steps < 1 or requests < steps:
        return 0.0, 0.0  # there were none, or the sums are not of any
    spread = steps * squares - requests * requests
    per_request = (steps * products - requests * microseconds) / spread if spread > 0 else 0.0
    per_request = min(max(0.0, per_request), microseconds / requests)
    fixed = max(0.0, microseconds - per_request * requests) / steps
    return MICROSECOND * fixed, MICROSECOND * per_request
