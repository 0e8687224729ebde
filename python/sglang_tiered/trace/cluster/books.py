"""What a router knows: its own requests under way, an index of blocks that trails the truth, and
what servers reported.

Events of blocks arrive ``lag_s`` late, a share of them never. Reports of queues come every
``report_s``. Prices may be wrong, by a factor or by noise.
"""

from __future__ import annotations

import collections
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.policy.routing import DecodeState, ServerState
from sglang_tiered.trace.cluster.residency import DEVICE, HOST, NVME, Residency
from sglang_tiered.trace.cluster.server import make_costs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.policy.cost_model import CostModel
    from sglang_tiered.trace.cluster.profiles import Kind
    from sglang_tiered.trace.cluster.server import Job, Server

__all__ = ["Books", "Knowledge"]

REPORT_S = 0.25
BUSY_S = 10.0  # over which a server's busy share is taken


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """How well a router knows: seconds that events trail, the share of them that is lost, seconds
    between reports, a factor on all learnt prices, and the sigma of lognormal noise on each."""

    lag_s: float = 0.0
    loss: float = 0.0
    report_s: float = REPORT_S
    price_factor: float = 1.0
    price_noise: float = 0.0


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
        self.predicted = Residency(count)
        self._late: collections.deque[tuple[float, Sequence[int], int, bool]] = collections.deque()
        self.num_requests = [0] * count  # sent and not answered to the end
        self.num_waiting = [0] * count  # of them, those without a first token
        self.prompt_tokens = [0] * count  # of those
        self.new_tokens = [0] * count  # of those, what was not expected to be held
        self.active_tokens = [0] * count  # prompts and answers of all that is under way
        costs: dict[str, CostModel] = {}
        self.states = [
            ServerState(
                costs=self._costs(server.kind, unit_tokens, costs),
                host_token_s=server.kind.hardware.kv_bytes_per_token
                / server.kind.hardware.host_bytes_per_s,
            )
            for server in servers
        ]
        self.decode_states = [
            DecodeState(
                prices=server.kind.step_s,
                max_tokens=server.kv_tokens,
                token_link_s=server.kind.hardware.kv_bytes_per_token
                / server.kind.network_bytes_per_s,
            )
            for server in servers
        ]
        self._next_report_s = 0.0
        self._last_report_s = 0.0
        self._pressed = [0.0] * count
        self._sizes = [0] * count  # of decode answers handed to each

    def _costs(self, kind: Kind, unit_tokens: int, known: dict[str, CostModel]) -> CostModel:
        knowledge = self.knowledge
        if knowledge.price_noise:
            sigma, factor = knowledge.price_noise, knowledge.price_factor
            factors = [factor * self._draw.lognormvariate(0, sigma) for _ in range(4)]
            return make_costs(kind, unit_tokens, factors)
        if kind.name not in known:
            known[kind.name] = make_costs(kind, unit_tokens, [knowledge.price_factor] * 4)
        return known[kind.name]

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
                self._late += [(now_s + knowledge.lag_s, *change) for change in changes]

    @staticmethod
    def _apply(where: Residency, units: Sequence[int], bits: int, is_added: bool) -> None:
        if is_added:
            where.add(units, bits)
        else:
            where.remove(units, bits)

    def died(self, server: int) -> None:
        for where in {id(self.truth): self.truth, id(self.view): self.view}.values():
            where.forget_server(server)

    # ---- Requests ----

    def sent(self, job: Job, new_tokens: int) -> None:
        server = job.server
        self.num_requests[server] += 1
        self.num_waiting[server] += 1
        self.prompt_tokens[server] += job.tokens
        self.new_tokens[server] += new_tokens
        self.active_tokens[server] += job.tokens
        job.router_work = new_tokens

    def answered(self, job: Job) -> None:
        """The first token has come."""
        server = job.server
        self.num_waiting[server] -= 1
        self.prompt_tokens[server] -= job.tokens
        self.new_tokens[server] -= int(job.router_work)
        if job.decode != server:
            self.num_requests[server] -= 1
            self.active_tokens[server] -= job.tokens

    def handed(self, job: Job) -> None:
        """It was sent to a decode server too."""
        state = self.decode_states[job.decode]
        state.num_running += 1
        state.num_tokens += job.need
        if job.decode != job.server:
            self.num_requests[job.decode] += 1

    def ended(self, job: Job) -> None:
        state = self.decode_states[job.decode]
        state.num_running -= 1
        state.num_tokens -= job.need
        self.num_requests[job.decode] -= 1
        if job.decode == job.server:
            self.active_tokens[job.server] -= job.tokens

    # ---- Before a choice ----

    def look(self, now_s: float, *, exactly: bool = False) -> None:
        """Take in what has arrived by now; ``exactly`` also what no report has said yet."""
        late = self._late
        while late and late[0][0] <= now_s:
            _, units, bits, is_added = late.popleft()
            self._apply(self.view, units, bits, is_added)
        if now_s >= self._next_report_s or exactly:
            passed = now_s - self._last_report_s
            is_due = now_s >= self._next_report_s
            gain = min(1.0, passed / BUSY_S)
            for position, server in enumerate(self._servers):
                if not server.is_open:
                    continue
                server.advance(now_s)
                state = self.states[position]
                state.free_s = now_s + server.queue_s()
                state.ahead = server.ahead()
                if is_due and passed > 0:
                    pressed = server.pressed_s - self._pressed[position]
                    self._pressed[position] = server.pressed_s
                    state.busy += gain * (pressed / passed - state.busy)
            if is_due:
                self._last_report_s = now_s
                self._next_report_s = now_s + self.knowledge.report_s
