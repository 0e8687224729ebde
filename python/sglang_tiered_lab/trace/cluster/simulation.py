"""One clock over a cluster: requests arrive, are routed, loaded for, prefilled, handed over and
decoded; servers die, drain and join."""

from __future__ import annotations

import heapq
import math
import time
from typing import TYPE_CHECKING, cast

from sglang_tiered.errors import ConfigError
from sglang_tiered.policy.balance import LOOK_S, RoleBalance
from sglang_tiered_lab.trace.cluster.books import Books
from sglang_tiered_lab.trace.cluster.outcome import Outcome
from sglang_tiered_lab.trace.cluster.plan import Change
from sglang_tiered_lab.trace.cluster.residency import DEVICE, HOST, NVME, numbers
from sglang_tiered_lab.trace.cluster.routers import make_router, predicted_ttft
from sglang_tiered_lab.trace.cluster.server import Job, Server, make_costs
from sglang_tiered_lab.trace.replay.copies import mix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.policy.balance import RoleSwitch
    from sglang_tiered.policy.cost_model import CostModel
    from sglang_tiered_lab.trace.cluster.plan import Plan
    from sglang_tiered_lab.trace.replay.server import Request


_SERVER, _HANDED, _CHANGE, _TIMER = range(4)

SWITCHES_S, DRAINED_S = 3.0, 120.0
"""What a switch takes once its server is idle, as measured; and for how long it waits to be idle.
"""


class Simulation:
    """Runs one plan over requests in order of arrival; ``run`` once."""

    def __init__(self, plan: Plan, requests: Sequence[Request]) -> None:
        self._plan = plan
        self._requests = requests
        self._heap: list[tuple[float, int, int, object, int]] = []
        self._order = 0
        tiers = plan.tiers
        self.servers = [
            Server(
                number,
                member.kind,
                member.role,
                plan.unit_tokens,
                (
                    member.kind.kv_tokens,
                    member.kind.host_tokens if "host" in tiers else 0,
                    member.kind.nvme_tokens if "nvme" in tiers else 0,
                ),
                costs,
            )
            for number, (member, costs) in enumerate(zip(plan.members, _costs(plan), strict=True))
        ]
        self._stored_in = tuple(
            tier
            for tier, name in ((DEVICE, ""), (HOST, "host"), (NVME, "nvme"))
            if not name or name in tiers
        )
        self._has_bucket = "bucket" in tiers
        self.books = Books(
            self.servers,
            plan.unit_tokens,
            plan.knowledge,
            plan.seed,
            has_peers={"peer", "nvme"} <= tiers,
        )
        self.router = make_router(
            plan.policy,
            self.servers,
            self.books,
            plan.unit_tokens,
            plan.tuning,
            plan.tpot_s,
            plan.seed,
        )
        self._handed: list[list[Job]] = [[] for _ in self.servers]  # that wait for room
        self._handing: dict[int, Job] = {}  # by number, on their way
        self.outcome = Outcome(len(requests), plan)
        self._shares = [sum(plan.classes[: n + 1]) for n in range(len(plan.classes))]
        known: set[int] = set()
        for change in sorted(plan.changes, key=lambda change: change.at_s):
            if change.what == "join" and change.server not in known:
                self.servers[change.server].is_live = False
                self.servers[change.server].is_open = False
            known.add(change.server)
            self._push(change.at_s, _CHANGE, change)
        if self.router.hears_reports or plan.admission in ("predicted", "soft"):
            self._push(0.0, _TIMER, (plan.knowledge.report_s, self.books.report))
        if self.router.poll_s:
            self._push(0.0, _TIMER, (self.router.poll_s, self._poll))
        self._balance: RoleBalance | None = None
        self._closed: set[int] = set()  # by a change, which no switch undoes
        self._switch: RoleSwitch | None = None
        self._ordered_s = self._busy_s = 0.0
        if plan.cooldown_s is not None:
            self._balance = RoleBalance(cooldown_s=plan.cooldown_s, floor=1, tpot_s=plan.tpot_s)
            self._push(0.0, _TIMER, (LOOK_S, self._look_at_roles))
        self._last_arrival_s = 0.0
        self._refresh()

    def _poll(self, now_s: float) -> None:
        for server in self.servers:
            server.advance(now_s)
        self.router.poll()

    def _push(self, at_s: float, what: int, payload: object, version: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, what, payload, version))

    def _refresh(self) -> None:
        is_open = [server for server in self.servers if server.is_open]
        self.router.open_servers = [one.number for one in is_open if one.role != "decode"]
        self.router.decoders = [one.number for one in is_open if one.role == "decode"]
        has_split = any(one.role != "both" for one in self.servers)
        if not self.router.open_servers or (has_split and not self.router.decoders):
            raise ConfigError(
                "no server is left to prefill or to decode; let fewer of them die or drain."
            )

    def run(self) -> Outcome:
        """Serve all requests to their ends."""
        start = time.perf_counter()
        heap = self._heap
        speed = self._plan.speed
        first_s = self._requests[0].arrival_s if self._requests else 0.0
        if self._requests:
            self._last_arrival_s = (self._requests[-1].arrival_s - first_s) / speed
        now_s = 0.0
        for number, request in enumerate(self._requests):
            now_s = (request.arrival_s - first_s) / speed
            while heap and heap[0][0] <= now_s:
                self._event()
            job = Job(number, request, self._class_of(request), now_s)
            if not self._is_shed(job, now_s):
                self._send(job, now_s)
        self.outcome.last_arrival_s = self._last_arrival_s
        pressed = [0.0] * len(self.servers)
        for server in self.servers:
            server.advance(self.outcome.last_arrival_s)
            pressed[server.number] = server.pressed_s
        while heap:
            self._event()
        self.outcome.close(self.servers, pressed, time.perf_counter() - start)
        return self.outcome

    def _class_of(self, request: Request) -> int:
        if len(self._shares) == 1:
            return 0
        units = request.units
        drawn = mix(units[min(1, len(units) - 1)] if units else 0) / 2**64 * self._shares[-1]
        return next(n for n, share in enumerate(self._shares) if drawn <= share)

    # ---- Events ----

    def _event(self) -> None:
        now_s, _, what, payload, version = heapq.heappop(self._heap)
        if what == _SERVER:
            assert isinstance(payload, Server)
            if payload.version == version:
                self._step(payload, now_s)
        elif what == _HANDED:
            assert isinstance(payload, Job)
            if payload.handoffs == version:
                self._receive(payload, now_s)
        elif what == _TIMER:
            every_s, act = cast("tuple[float, Callable[[float], None]]", payload)
            act(now_s)
            if now_s + every_s <= self._last_arrival_s:
                self._push(now_s + every_s, _TIMER, payload)
        else:
            assert isinstance(payload, Change)
            self._change(payload, now_s)

    def _send(self, job: Job, now_s: float) -> None:
        router, books = self.router, self.books
        number = router.choose(job, now_s)
        server = self.servers[number]
        job.decode = number if server.role == "both" else router.choose_decode(job)
        books.handed(job)
        server.advance(now_s)
        self._plan_loads(server, job, now_s)
        server.enqueue(job)
        self._step(server, now_s)

    def _plan_loads(self, server: Server, job: Job, now_s: float) -> None:
        matches = self.books.truth.match(job.request.units)
        held = matches.one(server.number, job.tokens, self._plan.unit_tokens)
        self._load(server, job, server.plan(job, held), now_s)

    def _next(self, server: Server, pick: Callable[[], Job | None], now_s: float) -> Job | None:
        """Take the next job for a batch; one that memory has lost a part of is planned again."""
        while (job := pick()) is not None and server.put_back(job):
            self._plan_loads(server, job, now_s)
        return job

    def _load(self, server: Server, job: Job, parts: list[int], now_s: float) -> None:
        """Begin a job's loads: from its drive, from another server's drive, from the bucket."""
        job.ready_s = now_s
        job.parts = tuple(parts)
        nvme, peer, bucket = parts
        token_bytes = server.kind.hardware.kv_bytes_per_token
        if nvme:
            job.ready_s = max(job.ready_s, server.disk.load(now_s, nvme * token_bytes)[1])
        if peer:
            position = job.load_start + nvme // self._plan.unit_tokens
            holders = self.books.truth.holders(job.request.units[position])
            held_by = [self.servers[one] for one in numbers(holders) if one != server.number]
            fixed_s, byte_s = server.kind.peer
            lend_s = 0.0
            if held_by:
                lender = min(held_by, key=lambda one: one.disk.wait_s(now_s))
                lend_s = lender.disk.load(now_s, peer * token_bytes)[1] - now_s
            begin_s = max(now_s, server.link_free_s)
            server.link_free_s = begin_s + fixed_s + peer * token_bytes * byte_s
            job.ready_s = max(job.ready_s, server.link_free_s, now_s + fixed_s + lend_s)
        if bucket:
            fixed_s, byte_s = server.kind.bucket
            begin_s = max(now_s, server.bucket_free_s)
            server.bucket_free_s = begin_s + bucket * token_bytes * byte_s
            job.ready_s = max(job.ready_s, server.bucket_free_s + fixed_s)
        self.outcome.loaded(parts, token_bytes)

    def _step(self, server: Server, now_s: float) -> None:
        """Do what is due on a server, begin what can begin, and say when the next thing is due."""
        server.advance(now_s)
        while server.running is not None and server.left_s <= 1e-9:
            self._prefilled(server, now_s)
        while (job := server.finish_decode()) is not None:
            self._ended(job, now_s)
        if server.role == "decode":
            self._admit_handed(server, now_s)
        if server.running is None and (job := self._next(server, server.pick, now_s)) is not None:
            server.begin(job)
            self.outcome.began(job, job.hits)
            while (job := self._next(server, server.pick_beside, now_s)) is not None:
                server.join(job)
                self.outcome.began(job, job.hits)
            server.launch()
        server.version += 1
        next_s = min(server.next_s(), server.wake_s())
        if next_s <= now_s and server.running is None and server.waiting:
            # Ready but without room: only a decode's end makes some.
            next_s = server.next_s()
        if next_s < math.inf:
            self._push(max(next_s, now_s), _SERVER, server, server.version)

    def _prefilled(self, server: Server, now_s: float) -> None:
        job, gone = server.finish_prefill()
        self._note_stored(server, job, gone, now_s)
        if job.decode == server.number:
            self._answer(job, now_s)
            server.begin_decode(job)
            return
        decoder = self.servers[job.decode]
        if not decoder.is_live:
            self.books.diverted(job)
            job.decode = self.router.choose_decode(job)
            self.books.handed(job)
            decoder = self.servers[job.decode]
        self._handed[job.decode].append(job)
        decoder.advance(now_s)
        self._admit_handed(decoder, now_s)

    def _note_stored(self, server: Server, job: Job, gone: list[list[int]], now_s: float) -> None:
        self.books.stored(
            server.number, server.stored_units(job), gone, now_s, self._stored_in, self._has_bucket
        )

    def _admit_handed(self, decoder: Server, now_s: float) -> None:
        """Begin handoffs for which there is room, in their order."""
        queue = self._handed[decoder.number]
        while queue and decoder.has_room(queue[0]):
            job = queue.pop(0)
            decoder.reserve(job)
            giver = self.servers[job.server]
            rate = min(giver.kind.network_bytes_per_s, decoder.kind.network_bytes_per_s)
            num_bytes = job.tokens * decoder.kind.hardware.kv_bytes_per_token
            begin_s = max(now_s, giver.handoff_free_s, decoder.handoff_free_s)
            end_s = begin_s + num_bytes / rate
            giver.handoff_free_s = decoder.handoff_free_s = end_s
            self.outcome.handoff_bytes += num_bytes
            job.handoffs += 1
            self._handing[job.number] = job
            self._push(end_s, _HANDED, job, job.handoffs)

    def _receive(self, job: Job, now_s: float) -> None:
        del self._handing[job.number]
        decoder = self.servers[job.decode]
        decoder.advance(now_s)
        gone = decoder.store(job)
        self._note_stored(decoder, job, gone, now_s)
        self._answer(job, now_s)
        decoder.begin_decode(job)
        self._step(decoder, now_s)

    def _answer(self, job: Job, now_s: float) -> None:
        self.books.answered(job)
        self.router.answered(job, now_s)
        self.outcome.answered(job, now_s)

    def _ended(self, job: Job, now_s: float) -> None:
        self.books.ended(job)
        self.books.learn_length(max(1, job.request.output_tokens))
        self.outcome.ended(job, now_s)

    # ---- Admission ----

    def _is_shed(self, job: Job, now_s: float) -> bool:
        plan, candidates = self._plan, self.router.open_servers
        if plan.admission == "none":
            return False
        is_last_class = len(plan.classes) == 1 or job.priority > 0
        if not is_last_class:
            return False
        args = (self.books, candidates, job, now_s, plan.unit_tokens)
        if plan.admission == "queue":
            is_shed = min(self.books.num_waiting[one] for one in candidates) >= plan.max_waiting
        else:
            is_shed = predicted_ttft(*args, exactly=False) > plan.ttft_s
            if plan.admission == "soft" and is_shed:
                is_shed = all(self.books.states[one].free_s > now_s for one in candidates)
        if is_shed:
            self.outcome.shed(job, predicted_ttft(*args, exactly=True) <= plan.ttft_s)
        return is_shed

    # ---- Changes ----

    def _change(self, change: Change, now_s: float) -> None:
        server = self.servers[change.server]
        server.advance(now_s)
        if change.what == "join":
            server.is_live = server.is_open = True
            server.last_s = now_s
            self._closed.discard(server.number)
        else:
            server.is_open = False
            self._closed.add(server.number)
        self._refresh()
        if change.what == "die" and server.is_live:
            self._die(server, now_s)

    # ---- Roles ----

    def _look_at_roles(self, now_s: float) -> None:
        """Order a switch, or see how far the last one is: its server drains, and then switches."""
        assert self._balance is not None
        if self._switch is None:
            ours = [one.number for one in self.servers if one.is_open]
            told = {str(one): [self.books.record(one, now_s)] for one in ours}
            self._switch = self._balance.look(now_s, told)
            if self._switch is not None:
                self._ordered_s = self._busy_s = now_s
                self.servers[int(self._switch.server)].is_open = False
                self._refresh()
            return
        server = self.servers[int(self._switch.server)]
        if self.books.num_requests[server.number]:
            self._busy_s = now_s
        switched = server.is_live and now_s - self._busy_s >= SWITCHES_S
        if switched:
            gone = server.switch(self._switch.role)
            self.books.stored(server.number, (), gone, now_s, (), bucket=False)
            self.router.died(server.number)
            self.outcome.switches.append((now_s, server.number, server.role))
        if switched or not server.is_live or now_s - self._ordered_s >= DRAINED_S:
            server.is_open = server.is_live and server.number not in self._closed
            self._refresh()
            self._balance.ended(self._switch, now_s, switched=switched, again=server.is_live)
            self._switch = None

    def _die(self, server: Server, now_s: float) -> None:
        number = server.number
        unanswered = {id(job) for job in (*server.waiting, server.running, *server.beside)}
        jobs = server.die()
        self.books.died(number, now_s)
        self.router.died(number)
        # Their handoffs, begun or not, end at it or come from it.
        handed, self._handed[number] = self._handed[number], []
        for queue in self._handed:
            handed += [job for job in queue if job.server == number]
            queue[:] = [job for job in queue if job.server != number]
        for job in [job for job in self._handing.values() if number in (job.server, job.decode)]:
            del self._handing[job.number]
            job.handoffs += 1
            handed.append(job)
            decoder = self.servers[job.decode]
            if decoder is not server:
                decoder.advance(now_s)
                decoder.release(job)
                self._step(decoder, now_s)
        unanswered |= {id(job) for job in handed}
        for job in sorted((*jobs, *handed), key=lambda job: job.number):
            if id(job) in unanswered:
                self.books.answered(job)
                self.router.withdrawn(job)
            self.books.ended(job)
            self.outcome.num_restarted += 1
            self._send(job, now_s)


def _costs(plan: Plan) -> list[CostModel]:
    """Return what each server takes things to cost; those of a kind share it where it is right."""
    knowledge = plan.knowledge
    if knowledge.misleads_prices and knowledge.misleads_servers:
        factors = knowledge.factors(len(plan.members), plan.seed)
        return [
            make_costs(member.kind, plan.unit_tokens, factor)
            for member, factor in zip(plan.members, factors, strict=True)
        ]
    kinds = {member.kind.name: member.kind for member in plan.members}
    right = {name: make_costs(kind, plan.unit_tokens) for name, kind in kinds.items()}
    return [right[member.kind.name] for member in plan.members]


def run_cluster(plan: Plan, requests: Sequence[Request]) -> Outcome:
    """Run one plan. Raises ``ConfigError`` where a request fits no server."""
    room = min(member.kind.kv_tokens for member in plan.members)
    largest = max((one.input_tokens + max(1, one.output_tokens) for one in requests), default=0)
    if largest > room:
        raise ConfigError(
            f"a request of {largest:,} tokens does not fit the {room:,} of device memory of the "
            "smallest server; take larger ones, or leave out long requests (trace scale)."
        )
    return Simulation(plan, requests).run()
