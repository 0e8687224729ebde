"""One server of a modelled cluster: tiers, loads, one batch of prefills at a time, and decodes
beside it.

Between two events everything goes on at a constant rate. A decode step takes a fixed time and one
per request and per token attended to. While prefills run, steps carry a chunk of them: the chunk
takes its own time and the step's variable part, and every decoding request gets one token. So a
prefill is slowed by decodes, and decodes by prefills; or, where ``mixes`` says that steps carry
either, decodes stand still. Those that wait are prefilled together as far as they fit a chunk.

Tiers are LRU caches of whole pages, each of all that was computed (``trace.replay.lru``), but for
what ``HostMemory`` keeps; the drive and its stores are those of ``trace.replay.disk``. What runs
takes device memory from the cache, as far as it is not part of it.

What the server expects of itself (its prices, its queue, what it loads) is what the real one
would: it knows no answer's length, and what decodes cost a prefill only as far as ``QueueWait``
has learnt it.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from sglang_tiered.policy.cost_model import CostModel, PrefillCost, TransferCost
from sglang_tiered.policy.queue_wait import PrefillWork, QueuePlace, QueueWait
from sglang_tiered_lab.trace.cluster.tree import HostMemory, Nodes, NodeTier, SharedBlocks
from sglang_tiered_lab.trace.replay.disk import Disk
from sglang_tiered_lab.trace.replay.lru import LruTier, lengths_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.policy.routing import Held
    from sglang_tiered_lab.trace.cluster.profiles import Kind
    from sglang_tiered_lab.trace.replay.server import Request


MAX_LOST = 8
"""Times that a load is planned again before its job is prefilled with what there is; SGLang's
default (``--hicache-storage-prefetch-retry-max-attempts``)."""


def make_costs(kind: Kind, unit_tokens: int, factors: Sequence[float] = (1, 1, 1, 1)) -> CostModel:
    """Return the cost model that a server of this kind has learnt, times ``factors`` for prefill,
    NVMe, peers and bucket."""
    hardware = kind.hardware
    prefill, nvme, peer, bucket = factors
    prices = (hardware.prefill_fixed_s, hardware.prefill_token_s, hardware.prefill_pair_s)
    read = (hardware.nvme_fixed_s, 1 / hardware.nvme_read_bytes_per_s)
    return CostModel(
        page_tokens=unit_tokens,
        bytes_per_token=hardware.kv_bytes_per_token,
        prefill=PrefillCost([price * prefill for price in prices]),
        transfers=[
            TransferCost([price * factor for price in tier])
            for tier, factor in ((read, nvme), (kind.peer, peer), (kind.bucket, bucket))
        ],
    )


class Job:
    """A request on its way. ``tokens`` is its prompt, and after a death also what was generated;
    ``left`` what is still to be generated; ``expected`` what the router takes both for."""

    __slots__ = (
        "arrival_s",
        "cached",
        "decode",
        "expected",
        "first_s",
        "handoffs",
        "hits",
        "left",
        "load_start",
        "load_stop",
        "matched",
        "num_lost",
        "number",
        "parts",
        "predicted_s",
        "priority",
        "ready_s",
        "request",
        "rest",
        "router_work",
        "sent_s",
        "server",
        "tokens",
        "v_start",
    )

    def __init__(self, number: int, request: Request, priority: int, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.number = number
        self.request = request
        self.priority = priority
        self.tokens = max(1, request.input_tokens)
        self.left = max(1, request.output_tokens)
        self.server = self.decode = -1
        self.first_s = math.nan
        self.ready_s = self.predicted_s = self.sent_s = 0.0
        self.router_work = self.expected = 0
        self.rest = 0  # tokens that it is expected to compute
        self.handoffs = 0  # begun or given up: an older one that ends is void
        self.load_start = self.load_stop = 0
        self.hits = (0, 0, 0)  # tokens on the device, in host memory, by loads
        self.matched = 0  # tokens that memory held when its load was planned
        self.num_lost = 0  # times that memory held less at its turn
        self.cached = 0  # tokens that its server also counts as cache
        self.parts: tuple[int, ...] = ()
        self.v_start = 0.0

    @property
    def need(self) -> int:
        """Tokens of keys and values at its end."""
        return self.tokens + self.left


class Server:
    """Times never go back from call to call. ``role`` is both, prefill or decode."""

    def __init__(
        self,
        number: int,
        kind: Kind,
        role: str,
        unit_tokens: int,
        sizes: tuple[int, int, int],
        costs: CostModel,
    ) -> None:
        self.number, self.kind, self.role = number, kind, role
        self.costs = costs  # the prices that it believes
        self._unit_tokens, self._sizes = unit_tokens, sizes
        self.kv_tokens = sizes[0]
        self.steps = 0.0
        self.last_s = 0.0
        self.pressed_s = 0.0  # with a prefill running or waiting
        self.prefilled_s = 0.0
        self.computed_tokens = 0
        self.version = 0
        self.is_live, self.is_open = True, True
        self._begin_empty()

    def _begin_empty(self) -> None:
        sizes, self._nodes = self._sizes, Nodes()
        self.host = HostMemory(sizes[1], sizes[0], self._nodes)
        self.tiers = (NodeTier(sizes[0], self._nodes), self.host, LruTier(sizes[2]))
        self.disk = Disk(self.kind.hardware)
        self.link_free_s = self.bucket_free_s = self.handoff_free_s = 0.0
        self.waiting: list[Job] = []
        self.running: Job | None = None
        self.beside: list[Job] = []  # in the same batch, and behind it
        self.left_s = 0.0  # of the running batch, alone
        self._batch_s = self._chunk_s = 0.0
        self._chunk_left = self._copied_bytes = 0
        self._loaded_tokens = 0  # for those that wait, in host memory
        self._cached_tokens = 0  # of what is used, what is also counted as cache
        self._shared = SharedBlocks()  # of that, what several requests use
        self._running_s = 0.0  # what it takes alone, and what it is expected to take
        self._expected_s = 0.0
        self.queue = QueueWait()
        self._places: dict[int, QueuePlace] = {}  # in it, by number of a job
        self._work = PrefillWork()
        self.waiting_tokens = 0  # that those which wait are expected to compute
        self.used_tokens = 0  # by what runs, answers to their ends included
        self._begun_tokens = 0.0  # of the decodes: prompts, less the steps before they began
        self.decoding: list[tuple[float, int, Job]] = []  # by the step at which they end
        self.attended = 0.0  # tokens that a step attends to
        self._sums = [0.0] * 5

    # ---- Time ----

    def _variable_s(self) -> float:
        _, per_request, per_token = self.kind.step_s
        return per_request * len(self.decoding) + per_token * self.attended

    def advance(self, now_s: float) -> None:
        """Bring the server to a time no later than its next event."""
        passed = now_s - self.last_s
        if passed <= 0:
            return
        self.last_s = now_s
        if self.running is not None:
            if self.kind.mixes:
                step_s = self._chunk_s + self._variable_s()
                self.left_s -= passed * self._chunk_s / step_s
                self.steps += passed / step_s
            else:
                self.left_s -= passed
            self.prefilled_s += passed
            self.pressed_s += passed
        else:
            if self.waiting:
                self.pressed_s += passed
            if self.decoding:
                step_s = self.kind.step_s[0] + self._variable_s()
                steps = passed / step_s
                self.steps += steps
                if self.role == "decode":
                    self._count(steps, step_s)

    def _count(self, steps: float, step_s: float) -> None:
        requests = float(len(self.decoding))
        one = (1.0, requests, step_s, requests * requests, requests * step_s)
        self._sums = [total + steps * more for total, more in zip(self._sums, one, strict=True)]

    def next_s(self) -> float:
        """Return when a prefill or a decode will end, if nothing else happens."""
        end_s = math.inf
        step_s = self.kind.step_s[0] + self._variable_s()
        if self.running is not None:
            if not self.kind.mixes:
                return self.last_s + max(0.0, self.left_s)
            step_s = self._chunk_s + self._variable_s()
            end_s = self.last_s + max(0.0, self.left_s) * step_s / self._chunk_s
        if self.decoding:
            end_s = min(end_s, self.last_s + max(0.0, self.decoding[0][0] - self.steps) * step_s)
        return end_s

    # ---- What it tells ----

    @property
    def held_tokens(self) -> int:
        """Tokens of keys and values that what runs has by now."""
        held = self._begun_tokens + len(self.decoding) * self.steps
        if self.running is not None:
            held += sum(job.tokens for job in (self.running, *self.beside))
        return max(0, int(held) - self._spared_tokens)

    @property
    def running_prefill_s(self) -> float:
        """What is left of the running prefill, at the server's prices."""
        if self.running is None:
            return 0.0
        return self._expected_s * max(0.0, self.left_s) / self._running_s

    @property
    def num_others(self) -> int:
        """Requests that a further prefill holds up."""
        prefilling = len(self.beside) + (self.running is not None)
        return len(self.waiting) + len(self.decoding) + prefilling

    @property
    def moments(self) -> tuple[float, float, float, float, float, float]:
        """SGLang's sums over decode steps: 1, b, t, b*b, b*t, g with batch size, microseconds and
        tokens."""
        steps, requests, seconds, squares, products = self._sums
        return steps, requests, 1e6 * seconds, squares, 1e6 * products, requests

    def busy_share(self) -> float:
        """Return the share of the last seconds in which a prefill ran."""
        return self._work.busy_share(self.last_s)

    # ---- Prefill ----

    def plan(self, job: Job, held: Held) -> list[int]:
        """Decide what to load for a job that has come, as the real server does; returns tokens of
        NVMe, peers and bucket, and counts the rest as queued work."""
        before = min(held.device + held.host, job.tokens - 1)
        new = job.tokens - before
        is_busy = self.running is not None or bool(self.decoding)
        parts = [0, 0, 0]
        if held.num_loadable and new > 1:
            plan = self.costs.plan(
                num_held=held.num_loadable,
                num_new=new,
                num_before=before,
                ahead=self.ahead(),
                queue_wait_s=self.queue.seconds(is_busy=is_busy, rank=job.priority),
                num_others=self.num_others,
                spans=((0, held.nvme), (1, held.peer), (2, held.object)),
            )
            parts = list(plan.parts) or parts
        job.matched = before
        loaded = sum(parts)
        job.load_start = (held.device + held.host) // self._unit_tokens
        job.load_stop = job.load_start + loaded // self._unit_tokens
        job.rest = new - loaded
        own_s = self.costs.prefill.seconds(job.rest, before + loaded)
        self._places[job.number] = self.queue.arrives(
            self._places.get(job.number), own_s, self.last_s, is_busy=is_busy, rank=job.priority
        )
        self.waiting_tokens += job.rest
        self._hold_loaded(loaded)
        return parts

    def _unplan(self, job: Job) -> None:
        self.waiting_tokens -= job.rest
        self._hold_loaded(-sum(job.parts))

    def _hold_loaded(self, tokens: int) -> None:
        """Take host memory for a load, which its request has to itself until it is prefilled."""
        self._loaded_tokens += tokens
        if self._sizes[1]:
            self.host.capacity_tokens = max(1, self._sizes[1] - self._loaded_tokens)

    def _touch(self, job: Job, matched: int) -> None:
        """Note a match: what it found is the most recently used, and a node ends there."""
        units = job.request.units[: -(-matched // self._unit_tokens)]
        self._nodes.note_match(units)
        for tier in self.tiers[:2]:
            tier.note_use(reversed(units))

    def put_back(self, job: Job) -> bool:
        """Give a job that was picked its place in the queue again, if memory has lost a part of
        what it held when the job's load was planned: to be planned again."""
        if self._match(job)[1] >= job.matched // self.kind.page_tokens * self.kind.page_tokens:
            return False
        job.num_lost += 1
        if job.num_lost > MAX_LOST:
            return False
        self._unplan(job)
        before = [
            one for one in self.waiting if (one.priority, one.number) < (job.priority, job.number)
        ]
        self.waiting.insert(len(before), job)
        return True

    def ahead(self) -> tuple[int, int, int]:
        """Return the tokens of loads under way, by tier."""
        now_s, per_token = self.last_s, self.kind.hardware.kv_bytes_per_token
        waits = (
            (self.disk.wait_s(now_s), 1 / self.kind.hardware.nvme_read_bytes_per_s),
            (self.link_free_s - now_s, self.kind.peer[1]),
            (self.bucket_free_s - now_s, self.kind.bucket[1]),
        )
        nvme, peer, bucket = (int(max(0.0, wait) / (per_token * rate)) for wait, rate in waits)
        return nvme, peer, bucket

    def enqueue(self, job: Job) -> None:
        """Add a job behind those that are at least as important."""
        position = len(self.waiting)
        while position and self.waiting[position - 1].priority > job.priority:
            position -= 1
        self.waiting.insert(position, job)

    def wake_s(self) -> float:
        """Return when a waiting job's load ends, if an idle server waits for nothing else."""
        if self.running is not None or not self.waiting:
            return math.inf
        return min(job.ready_s for job in self.waiting)

    def pick(self) -> Job | None:
        """Take the job whose prefill begins now, if there is one and there is room for it."""
        if self.running is not None:
            return None
        for position, job in enumerate(self.waiting):
            if job.ready_s <= self.last_s + 1e-9:
                if not self._fits(job):
                    return None
                del self.waiting[position]
                return job
            self._places[job.number].counts = False
        return None

    def pick_beside(self) -> Job | None:
        """Take a job for the batch that has begun, if the first that could has room in its chunk
        and beside all else."""
        if self._chunk_left <= 0:
            return None
        for position, job in enumerate(self.waiting):
            if job.ready_s <= self.last_s + 1e-9:
                if not self._fits(job):
                    return None
                if job.tokens - self._match(job)[2] > self._chunk_left:
                    return None
                del self.waiting[position]
                return job
        return None

    def _fits(self, job: Job) -> bool:
        """Whether a job has room beside what runs. What that holds of its prompt takes no more."""
        shared = self._shared.num_held(job.request.units) * self._unit_tokens
        used = self.used_tokens - self._spared_tokens
        return not used or used + job.need - shared <= self.kv_tokens

    @property
    def _spared_tokens(self) -> int:
        """What requests use together, as often as it is counted too much. Decode servers get every
        prompt from elsewhere, whole."""
        return self._shared.num_spared * self._unit_tokens if self.role == "both" else 0

    def _match(self, job: Job) -> tuple[int, int, int]:
        """Return how far the device, host memory and loads reach into a prompt, in whole pages, one
        beyond the other; the last token is always computed."""
        units = job.request.units
        device, host = self.tiers[0].units, self.host
        on_device = 0
        for unit in units:
            if unit not in device:
                break
            on_device += 1
        in_memory = on_device
        while in_memory < len(units) and (units[in_memory] in host or units[in_memory] in device):
            in_memory += 1
        usable = max(in_memory, job.load_stop) if in_memory >= job.load_start else in_memory
        page, unit = self.kind.page_tokens, self._unit_tokens
        limit = (job.tokens - 1) // page * page
        return min(limit, on_device * unit), min(limit, in_memory * unit), min(limit, usable * unit)

    def begin(self, job: Job) -> None:
        """Begin a batch with its prefill; ``job.hits`` says what it finds."""
        self.running = job
        self._batch_s, self._copied_bytes = self.kind.hardware.prefill_fixed_s, 0
        self._chunk_left = self.kind.chunk_tokens
        if self.decoding and not self.kind.mixes:
            # The step that is under way ends first.
            whole = math.ceil(self.steps - 1e-6)
            self._batch_s += (whole - self.steps) * (self.kind.step_s[0] + self._variable_s())
            self.steps = float(whole)
        self._expected_s = self.costs.prefill.prices[0]
        self._admit(job)

    def join(self, job: Job) -> None:
        """Prefill it in the batch that has begun just now."""
        self.beside.append(job)
        self._admit(job)

    def launch(self) -> None:
        """Note that the batch is complete."""
        self._work.launched(self._expected_s, self.last_s)

    def _admit(self, job: Job) -> None:
        device, memory, usable = self._match(job)
        job.hits = device, memory - device, usable - memory
        self._touch(job, memory)
        hardware, new = self.kind.hardware, job.tokens - usable
        self._batch_s += hardware.prefill_s(new, usable) - hardware.prefill_fixed_s
        self._copied_bytes += (usable - device) * hardware.kv_bytes_per_token
        self._chunk_left -= new
        self.queue.admitted(self._places.pop(job.number), self.last_s)
        self._unplan(job)
        prefill = self.costs.prefill
        self._expected_s += prefill.seconds(new, usable)
        self.left_s = self._running_s = max(self._batch_s, hardware.host_load_s(self._copied_bytes))
        # A step carries a chunk's tokens, however long attention to what is before them takes.
        num_computed = self.kind.chunk_tokens - self._chunk_left
        self._chunk_s = self.left_s / max(1, math.ceil(num_computed / self.kind.chunk_tokens))
        self.computed_tokens += new
        self._use(self._taken(job.need if self.role == "both" else job.tokens))
        self._count_cached(job, device)

    def finish_prefill(self) -> tuple[Job, list[list[int]]]:
        """End the first prefill of the batch: its blocks are in all tiers. Returns the job, and by
        tier the blocks that left for it."""
        job = self.running
        assert job is not None
        self.running = self.beside.pop(0) if self.beside else None
        if self.running is None:
            self._work.ended(self.last_s)
        if self.role != "both":
            self._count_cached(job, 0)
            self._use(-self._taken(job.tokens))
        return job, self.store(job)

    def stored_units(self, job: Job) -> Sequence[int]:
        """Return the blocks of a prompt that have a whole page."""
        units, page = job.request.units, self.kind.page_tokens
        return units[: -(-(job.request.input_tokens // page * page) // self._unit_tokens)]

    def store(self, job: Job) -> list[list[int]]:
        """Enter a prompt's blocks into all tiers; returns by tier those that left for it."""
        units = self.stored_units(job)
        page = self.kind.page_tokens
        num_tokens = job.request.input_tokens // page * page
        lengths = lengths_of(len(units), num_tokens, self._unit_tokens)
        if self.role != "prefill":
            self._count_cached(job, num_tokens)
        end = -(-sum(job.hits) // self._unit_tokens)
        self._nodes.add(units[:end])  # loaded, perhaps
        self._nodes.add(units)
        gone: list[list[int]] = []
        for tier in self.tiers:
            if tier.capacity_tokens:
                # The end of a prompt goes before its beginning, without which it is of no use.
                new = tier.touch(reversed(units), reversed(lengths))
                if tier is self.tiers[2] and new:
                    per_token = self.kind.hardware.kv_bytes_per_token
                    self.disk.store(self.last_s, new * per_token)
                elif tier is self.host and units:
                    self._note_used(job, units, lengths, new)
            gone.append(tier.trim() if tier.tokens > tier.capacity_tokens else [])
        device = self.tiers[0].units
        evicted = (*gone[0], *gone[1])
        self._nodes.forget(unit for unit in evicted if unit not in device and unit not in self.host)
        return gone

    def _note_used(self, job: Job, units: Sequence[int], lengths: Sequence[int], new: int) -> None:
        """Tell host memory what came back from it, and what is new in it."""
        device, host, loaded = job.hits if self.role != "decode" else (0, 0, 0)
        if host + loaded:
            end = -(-(device + host + loaded) // self._unit_tokens)
            self.host.came_back(units[:end], lengths[:end])
        if new > loaded:
            self.host.was_stored(units, sum(lengths))

    # ---- Decode ----

    def has_room(self, job: Job) -> bool:
        return not self.used_tokens or self.used_tokens + job.need <= self.kv_tokens

    def reserve(self, job: Job) -> None:
        """Take room for a job that is handed over."""
        self._use(self._taken(job.need))

    def release(self, job: Job) -> None:
        """Give the room back: the handoff was lost."""
        self._use(-self._taken(job.need))

    def begin_decode(self, job: Job) -> None:
        job.v_start = self.steps
        heapq.heappush(self.decoding, (self.steps + max(0, job.left - 1), job.number, job))
        self.attended += job.tokens + job.left / 2
        self._begun_tokens += job.tokens - self.steps

    def finish_decode(self) -> Job | None:
        """End the decode that is due, if one is."""
        if not self.decoding or self.decoding[0][0] > self.steps + 1e-6:
            return None
        _, _, job = heapq.heappop(self.decoding)
        self.attended -= job.tokens + job.left / 2
        self._begun_tokens -= job.tokens - job.v_start
        if not self.decoding:
            self.attended = self._begun_tokens = 0.0
        self._count_cached(job, 0)
        self._use(-self._taken(job.need))
        return job

    def _use(self, tokens: int) -> None:
        self.used_tokens += tokens
        others = self.used_tokens - self._cached_tokens
        self.tiers[0].capacity_tokens = max(0, self.kv_tokens - others)

    def _count_cached(self, job: Job, tokens: int) -> None:
        """Count so many tokens of what a job uses as part of the cache."""
        old, new = (count // self._unit_tokens for count in (job.cached, tokens))
        self._shared.hold(job.request.units[old:new])
        self._shared.release(job.request.units[new:old])
        self._cached_tokens += tokens - job.cached
        job.cached = tokens
        self._use(0)

    def _taken(self, tokens: int) -> int:
        """Return what a request takes that runs: whole pages, and one more, which SGLang keeps free
        for each at every step."""
        page = self.kind.page_tokens
        return (-(-tokens // page) + 1) * page

    def switch(self, role: str) -> list[list[int]]:
        """Take another role, when idle: memory is emptied, NVMe is not. Returns by tier the blocks
        that left."""
        device, host, nvme = self.tiers
        gone: list[list[int]] = [list(device.units), list(host.units), []]
        self._begin_empty()
        self.tiers = (*self.tiers[:2], nvme)
        self.role = role
        self.version += 1
        return gone

    def die(self) -> list[Job]:
        """End everything, pages included; returns the jobs that were there, with what they have
        generated."""
        jobs = list(self.waiting)
        if self.running is not None:
            jobs += [self.running, *self.beside]
        for _, _, job in self.decoding:
            made = min(job.left - 1, int(self.steps - job.v_start))
            job.tokens, job.left = job.tokens + made, job.left - made
            jobs.append(job)
        for job in jobs:
            job.cached = 0
        self.is_live = self.is_open = False
        self.version += 1
        self._begin_empty()
        return jobs
