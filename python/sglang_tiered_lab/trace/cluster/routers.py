"""The policies that choose a server, each by its published rules.

``in-turn``
    One after the other.
``hash``
    Of the first 1,024 tokens, by rendezvous.
``least-load``
    Fewest requests in flight.
``least-tokens``
    Fewest prompt tokens sent and not answered.
``p2c``
    Of two drawn at random, the one with fewer requests in flight.
``cache-aware``
    sglang-router 0.3.2: where the longest prefix was sent if that is more than ``cache_threshold``
    of the prompt, or else the least loaded. While requests in flight differ by more than
    ``balance_abs`` and by a factor of ``balance_rel``, the least loaded.
``dynamo``
    NVIDIA Dynamo 1.5's KV router: least ``overlap_weight * max(0, prefill - credit) + decode``.
    Prefill are the tokens of the prompt, and those that were to be computed of prompts without a
    first token; the credit is 1, 0.75 and 0.25 of what device, host and disk hold, and
    ``shared_credit`` of all below the device that somebody lends. Decode are the tokens of all
    prompts under way and of this one, a block that several of them share counted once. Drawn by
    softmax with a temperature above 0. For ``predicted_s`` it believes that a server holds what was
    sent to it. A server that only decodes is chosen by the decode term.
``llm-d``
    llm-d's router 0.10: most ``weights`` times prefix, free KV and short queue. The prefix is a
    share of the prompt, with what device, host and disk hold counted 1, 0.8 and 0.3; the queue is
    scaled by the shortest and the longest. Both loads are polled every 50 ms.
``cost``
    ``policy.routing``: seconds.
``oracle``
    The same with a fresh report of every server, and exact blocks, at each choice.

A server that only decodes is chosen in turn by ``in-turn``, by ``cost`` and ``oracle`` as
``choose_decode`` says, and by all others (but Dynamo) as the one with fewest requests.
"""

from __future__ import annotations

import collections
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.policy.routing import choose_decode, choose_server, least_ttft
from sglang_tiered_lab.trace.cluster.residency import numbers
from sglang_tiered_lab.trace.replay.copies import mix
from sglang_tiered_lab.trace.replay.lru import LruTier, lengths_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sglang_tiered.policy.routing import Held
    from sglang_tiered_lab.trace.cluster.books import Books
    from sglang_tiered_lab.trace.cluster.server import Job, Server


BLOCK_TOKENS = 64  # Dynamo counts in blocks of the servers' pages
TREE_TOKENS = (1 << 26) // 4
"""Of each server in sglang-router's tree: 2**26 characters, four to a token."""

CREDIT = {"dynamo": (1.0, 0.75, 0.25), "llm-d": (1.0, 0.8, 0.3)}
POLL_S = 0.05
"""Between llm-d's looks at the servers' metrics."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The settings of policies; the defaults are those published."""

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    overlap_weight: float = 1.0
    temperature: float = 0.0
    shared_credit: float = 0.0
    predicted_s: float = 0.0
    weights: tuple[float, float, float] = (2.0, 1.0, 1.0)
    charge: float = 1.0
    predict: bool = True
    learn: bool = True


class Router:
    """Chooses among ``open_servers``, which the simulation keeps; ``decoders`` likewise."""

    hears_reports = False

    def __init__(
        self,
        policy: str,
        servers: Sequence[Server],
        books: Books,
        unit_tokens: int,
        tuning: Tuning,
        tpot_s: float | None,
        seed: int,
    ) -> None:
        self.policy = policy
        self._servers = servers
        self._books = books
        self._unit_tokens = unit_tokens
        self._tuning = tuning
        self._tpot_s = tpot_s
        self._random = random.Random(f"router:{seed}")
        self.poll_s = 0.0
        self.open_servers: list[int] = []
        self.decoders: list[int] = []
        self._turn = self._decode_turn = 0
        # Until when servers are expected to hold blocks that no event has told of.
        self._expected: collections.deque[tuple[float, int, Sequence[int]]] = collections.deque()
        self._lag_s = books.knowledge.lag_s

    def choose(self, job: Job, now_s: float) -> int:
        """Return the server that prefills a job, and tell the books what it is expected to
        compute."""
        server, new_tokens = self._choose(job, now_s)
        job.server = server
        self._books.sent(job, new_tokens)
        return server

    def _choose(self, job: Job, now_s: float) -> tuple[int, int]:
        raise NotImplementedError

    def choose_decode(self, job: Job) -> int:
        """Return the server that decodes it, of those that do nothing else."""
        return self._least_loaded(self.decoders, self._books.num_requests)

    def answered(self, job: Job, now_s: float) -> None:
        """The first token of a job has come."""

    def withdrawn(self, job: Job) -> None:
        """A job is to be sent again, before its first token."""

    def died(self, server: int) -> None:
        """A server has lost all that it held."""

    def poll(self) -> None:
        """Look at the servers' metrics; called every ``poll_s``, if that is not 0."""

    def _least_loaded(self, among: Sequence[int], loads: Sequence[int] | Mapping[int, int]) -> int:
        least = min(loads[server] for server in among)
        equal = [server for server in among if loads[server] == least]
        return equal[int(self._random.random() * len(equal))]


class _InTurn(Router):
    def _choose(self, job: Job, now_s: float) -> tuple[int, int]:
        self._turn += 1
        return self.open_servers[self._turn % len(self.open_servers)], job.tokens

    def choose_decode(self, job: Job) -> int:
        self._decode_turn += 1
        return self.decoders[self._decode_turn % len(self.decoders)]


class _Hash(Router):
    def _choose(self, job: Job, now_s: float) -> tuple[int, int]:
        units = job.request.units
        key = units[min(len(units) - 1, max(0, 1024 // self._unit_tokens - 1))] if units else 0
        return max(self.open_servers, key=lambda server: mix(key * 1_000_003 + server)), job.tokens


class _LeastLoad(Router):
    def _choose(self, job: Job, now_s: float) -> tuple[int, int]:
        return self._least_loaded(self.open_servers, self._books.num_requests), job.tokens


class _LeastTokens(Router):
    def _choose(self, job: Job, now_s: float) -> tuple[int, int]:
        return self._least_loaded(self.open_servers, self._books.prompt_tokens), job.tokens


class _TwoChoices(Router):
    def _choose(self, job: Job, now_s: float) -> tuple[int, int]:
        drawn = [self._random.choice(self.open_servers) for _ in range(2)]
        return min(drawn, key=lambda server: self._books.num_requests[server]), job.tokens


class _CacheAware(Router):
    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self._sent: dict[int, int] = {}
        self._trees = [LruTier(TREE_TOKENS) for _ in self._servers]

    def _choose(self, job: Job, now_s: float) -> tuple[int, int]:
        units, books, tuning = job.request.units, self._books, self._tuning
        loads = [books.num_requests[server] for server in self.open_servers]
        server = -1
        is_uneven = max(loads) - min(loads) > tuning.balance_abs
        if not (is_uneven and max(loads) > tuning.balance_rel * min(loads)):
            alive = sum(1 << one for one in self.open_servers)
            matched = 0
            for unit in units:
                left = alive & self._sent.get(unit, 0)
                if not left:
                    break
                alive, matched = left, matched + 1
            if matched and matched > tuning.cache_threshold * len(units):
                server = min(numbers(alive), key=lambda one: books.num_requests[one])
        if server < 0:
            server = self._least_loaded(self.open_servers, books.num_requests)
        self._note(server, job)
        return server, job.tokens

    def _note(self, server: int, job: Job) -> None:
        units, tree = job.request.units, self._trees[server]
        tree.touch(units, lengths_of(len(units), job.request.input_tokens, self._unit_tokens))
        bit = 1 << server
        for unit in units:
            self._sent[unit] = self._sent.get(unit, 0) | bit
        self._forget(tree.trim(), bit)

    def died(self, server: int) -> None:
        self._forget(self._trees[server].units, 1 << server)
        self._trees[server] = LruTier(TREE_TOKENS)

    def _forget(self, units: Iterable[int], bit: int) -> None:
        for unit in units:
            left = self._sent.get(unit, 0) & ~bit
            if left:
                self._sent[unit] = left
            else:
                self._sent.pop(unit, None)


class _Indexed(Router):
    """Those that know blocks: by events, and by what they have sent."""

    def _held(self, job: Job, now_s: float) -> tuple[dict[int, Held], Held]:
        books = self._books
        books.look(now_s)
        if self.policy == "oracle":
            books.report(now_s)
        while self._expected and self._expected[0][0] <= now_s:
            _, server, units = self._expected.popleft()
            books.predicted.settle(server, units)
        index = books.truth if self.policy == "oracle" else books.view
        return index.match(job.request.units, books.predicted).held(job.tokens, self._unit_tokens)

    def _predict(self, job: Job) -> None:
        """Believe that the server will hold the job's blocks: siblings come before events."""
        self._books.predicted.expect(job.server, job.request.units)

    def _predict_until(self, at_s: float, job: Job) -> None:
        self._expected.append((at_s, job.server, job.request.units))

    def died(self, server: int) -> None:
        self._expected = collections.deque(one for one in self._expected if one[1] != server)


class _Dynamo(_Indexed):
    def _choose(self, job: Job, now_s: float) -> tuple[int, int]:
        held, elsewhere = self._held(job, now_s)
        books, tuning = self._books, self._tuning
        credit, shared = CREDIT["dynamo"], tuning.shared_credit
        shares = books.active.held(job)
        scores = []
        for server in self.open_servers:
            mine = held.get(server, elsewhere)
            saved = credit[0] * mine.device + credit[1] * mine.host + credit[2] * mine.nvme
            all_saved = saved + shared * (mine.host + mine.num_loadable)
            prefill = max(0.0, books.new_tokens[server] + job.tokens - all_saved)
            decode = 0
            if self._servers[server].role == "both":
                decode = self._active_tokens(server, job, shares)
            score = (tuning.overlap_weight * prefill + decode) / BLOCK_TOKENS
            scores.append((score, int(max(0.0, job.tokens - saved)), server))
        if tuning.temperature > 0:
            low, high = min(scores)[0], max(scores)[0]
            scale = (high - low) or 1.0
            weights = [
                math.exp(-(score - low) / scale / tuning.temperature) for score, _, _ in scores
            ]
            _, new, server = self._random.choices(scores, weights)[0]
        else:
            least = min(scores)[0]
            equal = [one for one in scores if one[0] == least]
            _, new, server = equal[int(self._random.random() * len(equal))]
        if tuning.predicted_s:
            job.server = server
            self._predict(job)
            self._predict_until(now_s + tuning.predicted_s, job)
        return server, new

    def choose_decode(self, job: Job) -> int:
        shares = self._books.active.held(job)
        loads = {server: self._active_tokens(server, job, shares) for server in self.decoders}
        return self._least_loaded(self.decoders, loads)

    def _active_tokens(self, server: int, job: Job, shares: Mapping[int, int]) -> int:
        """Return the tokens of prompts under way on a server with this one among them."""
        return self._books.active.tokens[server] + job.tokens - shares.get(server, 0)


class _LlmD(_Indexed):
    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.poll_s = POLL_S
        self._waiting = [0] * len(self._servers)
        self._free = [1.0] * len(self._servers)

    def poll(self) -> None:
        for number, server in enumerate(self._servers):
            self._waiting[number] = len(server.waiting)
            self._free[number] = 1 - server.held_tokens / server.kv_tokens

    def _choose(self, job: Job, now_s: float) -> tuple[int, int]:
        held, elsewhere = self._held(job, now_s)
        credit, weights, waiting = CREDIT["llm-d"], self._tuning.weights, self._waiting
        low = min(waiting[one] for one in self.open_servers)
        high = max(waiting[one] for one in self.open_servers)
        best: list[tuple[int, int]] = []
        best_score = -1.0
        for one in self.open_servers:
            mine = held.get(one, elsewhere)
            saved = credit[0] * mine.device + credit[1] * mine.host + credit[2] * mine.nvme
            queue = (high - waiting[one]) / (high - low) if high > low else 1.0
            score = weights[0] * saved / job.tokens
            score += weights[1] * self._free[one] + weights[2] * queue
            if score > best_score + 1e-9:
                best, best_score = [], score
            if score >= best_score - 1e-9:
                best.append((one, max(0, job.tokens - mine.device - mine.host - mine.nvme)))
        return best[int(self._random.random() * len(best))]


class _Cost(_Indexed):
    hears_reports = True

    def _choose(self, job: Job, now_s: float) -> tuple[int, int]:
        held, elsewhere = self._held(job, now_s)
        books = self._books
        server, expected = choose_server(
            {one: books.states[one] for one in self.open_servers},
            held,
            job.tokens,
            now_s,
            elsewhere=elsewhere,
            charge=self._tuning.charge,
            draw=self._random.random,
        )
        job.server, job.predicted_s = server, expected.ttft_s
        job.sent_s = now_s
        books.states[server].reserve(now_s, expected.work_s)
        if self._tuning.predict:
            self._predict(job)
        mine = held.get(server, elsewhere)
        return server, max(0, job.tokens - mine.device - mine.host - expected.loaded)

    def answered(self, job: Job, now_s: float) -> None:
        if self._tuning.learn:
            state = self._books.states[job.server]
            state.answered(job.predicted_s, now_s - job.sent_s)
        if self._tuning.predict:
            # Its event is on the way; from then on the index says if the blocks are still there.
            self._predict_until(now_s + self._lag_s, job)

    def withdrawn(self, job: Job) -> None:
        if self._tuning.predict:
            self._books.predicted.settle(job.server, job.request.units)

    def choose_decode(self, job: Job) -> int:
        return choose_decode(
            {one: self._books.states[one].decode for one in self.decoders},
            job.tokens,
            int(self._books.mean_new_tokens),
            tpot_s=math.inf if self._tpot_s is None else self._tpot_s,
            draw=self._random.random,
        )


def predicted_ttft(
    books: Books,
    candidates: Sequence[int],
    job: Job,
    now_s: float,
    unit_tokens: int,
    *,
    exactly: bool,
) -> float:
    """Return the least time to the first token that any server promises: by what the router knows,
    or ``exactly``, by what is."""
    books.look(now_s)
    index, states = books.view, {one: books.states[one] for one in candidates}
    if exactly:
        index, states = books.truth, books.fresh_states(candidates, now_s)
    held, elsewhere = index.match(job.request.units, books.predicted).held(job.tokens, unit_tokens)
    return least_ttft(states, held, job.tokens, now_s, elsewhere=elsewhere)


_ROUTERS: dict[str, type[Router]] = {
    "in-turn": _InTurn,
    "hash": _Hash,
    "least-load": _LeastLoad,
    "least-tokens": _LeastTokens,
    "p2c": _TwoChoices,
    "cache-aware": _CacheAware,
    "dynamo": _Dynamo,
    "llm-d": _LlmD,
    "cost": _Cost,
    "oracle": _Cost,
}


def make_router(
    policy: str,
    servers: Sequence[Server],
    books: Books,
    unit_tokens: int,
    tuning: Tuning,
    tpot_s: float | None,
    seed: int,
) -> Router:
    return _ROUTERS[policy](policy, servers, books, unit_tokens, tuning, tpot_s, seed)
