"""One modelled server: a queue, one prefill at a time, and the tiers behind it.

Simulated time moves from event to event: a request arrives, becomes ready (what it waits for is
loaded), begins, finishes. Of the waiting requests the one that can begin soonest does, in order of
arrival where several can; a request whose load is under way is passed by those behind it, as
SGLang's scheduler does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered_lab.trace.replay.timing import Hardware
    from sglang_tiered_lab.trace.replay.totals import Totals


class Request(NamedTuple):
    """``units`` names the prompt's parts of equal length, the last one filled in part; equal names
    are equal prefixes. ``returning``: an earlier request had the same beginning."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    units: Sequence[int]
    returning: bool


class Match(NamedTuple):
    """Counts the leading units of a request by the tier that serves them."""

    device: int
    host: int
    nvme: int


class Job:
    """Holds a request on a server, which may begin at ``ready_s``: ``inf`` while its load is put
    off."""

    __slots__ = (
        "is_polled",
        "load_begin_s",
        "load_end_s",
        "load_start",
        "load_stop",
        "ready_s",
        "request",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ready_s = request.arrival_s
        self.load_start = self.load_stop = 0  # units that are loaded from NVMe for it
        self.load_begin_s = self.load_end_s = 0.0
        self.is_polled = False


class Stack(Protocol):
    """Models the tiers of one server under one policy. Times never go back from call to call."""

    @property
    def num_put_off(self) -> int:
        """Waiting jobs whose loads have not begun for want of room."""
        ...

    def arrive(self, job: Job, now_s: float) -> None:
        """Look the prompt up and begin what is to be loaded; may set ``job.ready_s``."""
        ...

    def poll(self, job: Job, now_s: float) -> None:
        """The job could begin now but for its load; may bring ``job.ready_s`` forward, in which
        case it begins with what has arrived by then."""
        ...

    def begin(self, job: Job, now_s: float) -> Match:
        """Begin a job's prefill; return what of its prefix is there."""
        ...

    def finish(self, job: Job, now_s: float) -> None:
        """End a job's prefill: its pages are on the device, and go to the tiers below."""
        ...

    def retry(self, jobs: Sequence[Job], now_s: float) -> None:
        """Begin loads of put-off jobs, first come first served, as far as there is room now."""
        ...

    def close(self) -> None:
        """End the trace: finish what runs in the background, add up the counts."""
        ...

    def check_integrity(self) -> None: ...


class Server:
    """Owns its stack; adds what happens to ``totals``."""

    def __init__(
        self, stack: Stack, hardware: Hardware, totals: Totals, *, unit_tokens: int
    ) -> None:
        self._stack = stack
        self._hardware = hardware
        self._totals = totals
        self._unit_tokens = unit_tokens
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._free_s = 0.0  # when the running job is done, or the last one was

    def submit(self, request: Request) -> None:
        """Submit a request, which arrives no earlier than the last one."""
        now_s = request.arrival_s
        self._run_until(now_s)
        job = Job(request)
        self._stack.arrive(job, now_s)
        self._waiting.append(job)

    def close(self) -> None:
        """Serve what still waits."""
        self._run_until(math.inf)
        self._stack.close()
        assert not self._waiting, f"{len(self._waiting)} requests were never served"

    def check_integrity(self) -> None:
        self._stack.check_integrity()

    def _run_until(self, now_s: float) -> None:
        while True:
            if self._running is not None:
                if self._free_s > now_s:
                    return
                job, self._running = self._running, None
                self._stack.finish(job, self._free_s)
            if not self._waiting:
                return
            position, start_s = self._next()
            if start_s > now_s or start_s == math.inf:
                return
            self._begin(self._waiting.pop(position), start_s)

    def _next(self) -> tuple[int, float]:
        """Return the job that can begin soonest, and when."""
        free_s = self._free_s
        best, best_s = 0, math.inf
        for position, job in enumerate(self._waiting):
            could_s = max(free_s, job.request.arrival_s)
            if job.ready_s > could_s and not job.is_polled:
                job.is_polled = job.ready_s < math.inf
                self._stack.poll(job, could_s)
            if job.ready_s < best_s:
                best, best_s = position, job.ready_s
                if best_s <= free_s:
                    break
        return best, max(free_s, best_s)

    def _begin(self, job: Job, now_s: float) -> None:
        request, hardware, totals = job.request, self._hardware, self._totals
        match = self._stack.begin(job, now_s)
        num_units, unit_tokens = len(request.units), self._unit_tokens
        input_tokens = request.input_tokens
        bounds = [0, match.device, match.device + match.host, sum(match)]
        tokens = [min(bound * unit_tokens, input_tokens) for bound in bounds]
        for i, tier in enumerate(totals.units_hit):
            if match[i]:
                totals.units_hit[tier] += match[i]
                totals.tokens_hit[tier] += tokens[i + 1] - tokens[i]
        hit_tokens = tokens[3]
        totals.num_requests += 1
        totals.num_units += num_units
        totals.num_tokens += input_tokens
        totals.units_missed += num_units - bounds[3]
        totals.tokens_missed += input_tokens - hit_tokens
        # The last token is always computed: the first answer token comes from it.
        before = min(hit_tokens, max(0, input_tokens - 1))
        prefill_s = hardware.prefill_s(input_tokens - before, before)
        from_host = (tokens[3] - tokens[1]) * hardware.kv_bytes_per_token
        service_s = max(prefill_s, hardware.host_load_s(from_host))
        totals.host_bytes_loaded += from_host
        totals.prefill_s += prefill_s
        totals.prefill_saved_s += hardware.prefill_s(input_tokens, 0) - prefill_s
        totals.queue_s += now_s - request.arrival_s
        self._running = job
        self._free_s = now_s + service_s
        ttft_s = self._free_s - request.arrival_s
        totals.ttft.add(ttft_s)
        if request.returning:
            totals.ttft_returning.add(ttft_s)
        totals.last_s = max(totals.last_s, self._free_s)
        if self._stack.num_put_off:
            self._stack.retry(self._waiting, now_s)
