"""What a router knows: its own requests under way, an index of blocks that trails the truth, and
what servers reported.

Events of blocks arrive ``lag_s`` late, a share of them never. Reports come every ``report_s``, and
say what a record of ``GET /tier/costs`` says. How long an answer will be nobody tells: it is taken
to be as long as answers were so far. Prices may be wrong, by a factor or by noise, in the reports
alone or in the servers' own plans too.
"""

from __future__ import annotations

import collections
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.policy.routing import ServerState
from sglang_tiered_lab.trace.cluster.records import Reporter
from sglang_tiered_lab.trace.cluster.residency import (
    DEVICE,
    HOST,
    NVME,
    Expected,
    Residency,
    numbers,
)
from sglang_tiered_lab.trace.cluster.server import make_costs
from sglang_tiered_lab.trace.replay.lru import lengths_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sglang_tiered.policy.server_costs import RankCosts
    from sglang_tiered_lab.trace.cluster.server import Job, Server


REPORT_S = 0.25

MEAN_NEW_TOKENS = 256.0
"""Of an answer, before any ended."""


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """How well a router knows: seconds that events trail, the share of them that is lost, seconds
    between reports, a factor on all learnt prices, and the sigma of lognormal noise on each.
    ``misleads_servers``: servers plan with the wrong prices too."""

    lag_s: float = 0.0
    loss: float = 0.0
    report_s: float = REPORT_S
    price_factor: float = 1.0
    price_noise: float = 0.0
    misleads_servers: bool = False

    @property
    def misleads_prices(self) -> bool:
        return self.price_noise > 0 or self.price_factor != 1

    def factors(self, count: int, seed: int) -> list[tuple[float, ...]]:
        """Draw what the prices of each server are multiplied by: prefill, NVMe, peers, bucket."""
        draw, sigma = random.Random(f"prices:{seed}"), self.price_noise
        return [
            tuple(self.price_factor * draw.lognormvariate(0, sigma) for _ in range(4))
            for _ in range(count)
        ]


class ActiveBlocks:
    """The blocks of the prompts under way on each server, a shared one counted once."""

    def __init__(self, count: int, unit_tokens: int) -> None:
        self._unit_tokens = unit_tokens
        # Of each server: how many requests hold a block, and its tokens.
        self._counts: list[dict[int, tuple[int, int]]] = [{} for _ in range(count)]
        self._servers: dict[int, int] = {}  # of each block, as bits
        self.tokens = [0] * count

    def _lengths(self, job: Job) -> Iterator[tuple[int, int]]:
        units, tokens = job.request.units, job.request.input_tokens
        return zip(units, lengths_of(len(units), tokens, self._unit_tokens), strict=True)

    def add(self, server: int, job: Job) -> None:
        counts, servers = self._counts[server], self._servers
        for unit, length in self._lengths(job):
            known = counts.get(unit)
            if known is not None:
                counts[unit] = known[0] + 1, known[1]
                continue
            counts[unit] = 1, length
            self.tokens[server] += length
            servers[unit] = servers.get(unit, 0) | 1 << server

    def remove(self, server: int, job: Job) -> None:
        counts, servers = self._counts[server], self._servers
        for unit in job.request.units:
            number, length = counts.pop(unit)
            if number > 1:
                counts[unit] = number - 1, length
                continue
            self.tokens[server] -= length
            others = servers.pop(unit) & ~(1 << server)
            if others:
                servers[unit] = others

    def held(self, job: Job) -> dict[int, int]:
        """Return how many of the first tokens of a prompt are under way already, by server; those
        with none are left out."""
        found: dict[int, int] = {}
        alive, tokens = -1, 0
        for unit, length in self._lengths(job):
            left = alive & self._servers.get(unit, 0)
            if alive != left and tokens:
                for server in numbers(alive & ~left):
                    found[server] = tokens
            alive, tokens = left, tokens + length
            if not left:
                return found
        for server in numbers(alive) if tokens else ():
            found[server] = tokens
        return found


class Books:
    """One router's. ``truth`` is updated with every event, ``view`` is what the router sees."""

    def __init__(
        self,
        servers: Sequence[Server],
        unit_tokens: int,
        knowledge: Knowledge,
        seed: int,
        *,
        has_peers: bool = True,
    ) -> None:
        count = len(servers)
        self._servers = servers
        self.knowledge = knowledge
        self._draw = random.Random(f"books:{seed}")
        self.truth = Residency(count, has_peers=has_peers)
        is_exact = knowledge.lag_s == 0 and knowledge.loss == 0
        self.view = self.truth if is_exact else Residency(count, has_peers=has_peers)
        self.predicted = Expected(count)
        self._late: collections.deque[tuple[float, int, Sequence[int], int, bool]] = (
            collections.deque()
        )
        self.num_requests = [0] * count  # sent and not answered to the end
        self.num_waiting = [0] * count  # of them, those without a first token
        self.prompt_tokens = [0] * count  # of those
        self.new_tokens = [0] * count  # of those, what was not expected to be held
        self.active = ActiveBlocks(count, unit_tokens)  # of all that is decoded, or will be
        self.mean_new_tokens = MEAN_NEW_TOKENS
        self._num_coming = [0] * count  # to be handed over to it
        self._tokens_coming = [0] * count
        wrong = [server.costs for server in servers]
        if knowledge.misleads_prices and not knowledge.misleads_servers:
            factors = knowledge.factors(count, seed)
            wrong = [
                make_costs(server.kind, unit_tokens, factor)
                for server, factor in zip(servers, factors, strict=True)
            ]
        self._reporters = list(map(Reporter, servers, wrong))
        self.states = [ServerState(one.take(0.0), 0.0) for one in self._reporters]

    # ---- Events ----

    def stored(
        self,
        server: int,
        units: Sequence[int],
        gone: Sequence[Sequence[int]],
        now_s: float,
        tiers: Sequence[int],
        bucket: bool,
    ) -> None:
        """A server has stored blocks in ``tiers`` (and a bucket), and dropped others by tier."""
        truth = self.truth
        changes = [(units, truth.bits(server, tiers, bucket), True)]
        changes += [
            (dropped, truth.bits(server, (tier,)), False)
            for tier, dropped in zip((DEVICE, HOST, NVME), gone, strict=True)
            if dropped
        ]
        for change in changes:
            self._apply(truth, *change)
        if self.view is not truth:
            knowledge = self.knowledge
            if self._draw.random() >= knowledge.loss:
                due_s = now_s + knowledge.lag_s
                self._late += [(due_s, server, *change) for change in changes]

    @staticmethod
    def _apply(where: Residency, units: Sequence[int], bits: int, is_added: bool) -> None:
        if is_added:
            where.add(units, bits)
        else:
            where.remove(units, bits)

    def died(self, server: int, now_s: float) -> None:
        """Forget what a server held and what it told; what was sent to it is settled apart."""
        for where in (self.truth, self.view, self.predicted):
            where.forget_server(server)
        self._late = collections.deque(late for late in self._late if late[1] != server)
        state = self.states[server]
        state.slowdown = 1.0
        state.sent.clear()
        state.report(self.record(server, now_s), now_s)

    # ---- Requests ----

    def sent(self, job: Job, new_tokens: int) -> None:
        server = job.server
        self.num_requests[server] += 1
        self.num_waiting[server] += 1
        self.prompt_tokens[server] += job.tokens
        self.new_tokens[server] += new_tokens
        job.router_work = new_tokens

    def answered(self, job: Job) -> None:
        """The first token has come."""
        server = job.server
        self.num_waiting[server] -= 1
        self.prompt_tokens[server] -= job.tokens
        self.new_tokens[server] -= int(job.router_work)
        if job.decode != server:
            self.num_requests[server] -= 1
            self._arrives(job)

    def handed(self, job: Job) -> None:
        """It was sent to a decode server too."""
        state = self.states[job.decode].decode
        job.expected = job.tokens + int(self.mean_new_tokens)
        state.num_running += 1
        state.num_tokens += job.expected
        self.active.add(job.decode, job)
        if job.decode != job.server:
            self.num_requests[job.decode] += 1
            self._num_coming[job.decode] += 1
            self._tokens_coming[job.decode] += job.expected

    def _arrives(self, job: Job) -> None:
        """From now on its decode server tells of it."""
        self._num_coming[job.decode] -= 1
        self._tokens_coming[job.decode] -= job.expected

    def ended(self, job: Job) -> None:
        """Its decode server has no more to do with it."""
        state = self.states[job.decode].decode
        state.num_running = max(0, state.num_running - 1)
        state.num_tokens = max(0, state.num_tokens - job.expected)
        self.active.remove(job.decode, job)
        self.num_requests[job.decode] -= 1

    def diverted(self, job: Job) -> None:
        """It goes to another decode server than was told, before its first token."""
        self._arrives(job)
        self.ended(job)

    def learn_length(self, num_tokens: int) -> None:
        """Note how long an answer was."""
        self.mean_new_tokens += 0.02 * (num_tokens - self.mean_new_tokens)

    # ---- Before a choice ----

    def look(self, now_s: float) -> None:
        """Take in the changes of blocks that have arrived by now."""
        late = self._late
        while late and late[0][0] <= now_s:
            _, _, units, bits, is_added = late.popleft()
            self._apply(self.view, units, bits, is_added)

    def record(self, server: int, now_s: float) -> RankCosts:
        """Return what a server says now."""
        return self._reporters[server].take(now_s)

    def report(self, now_s: float) -> None:
        """Take in what all servers say now."""
        for number, server in enumerate(self._servers):
            if server.is_live:
                self.states[number].report(self.record(number, now_s), now_s)
                decode = self.states[number].decode
                # What is on its way there no record has.
                decode.num_running += self._num_coming[number]
                decode.num_tokens += self._tokens_coming[number]

    def fresh_states(self, among: Iterable[int], now_s: float) -> dict[int, ServerState]:
        """Return the states of ``among``, with what the servers would say now."""
        fresh = {}
        for number in among:
            state = fresh[number] = ServerState(self.record(number, now_s), now_s)
            state.slowdown = self.states[number].slowdown
        return fresh
