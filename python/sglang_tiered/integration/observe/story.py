"""``Story``: one request, whose line is filled in as it lives; ``finish``, which completes it; and
``LineWriter``, whose thread writes it. No SGLang here.

The scheduler hands over what it knows of a request and goes on; what the thread cannot take is
dropped and counted. So is what the disk refuses: nothing is tried twice, a line is whole or absent,
and the next one is written as soon as the disk takes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.request_log import (
    NO_TIME,
    VERSION,
    RequestRecord,
    Sources,
    TierLoad,
    Wait,
    older,
    open_log,
)
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.base import Meter, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from sglang_tiered.request_log import Why
    from sglang_tiered.storage.base import Job


_DIGITS = 6
"""Of a second: microseconds."""

MAX_QUEUED = 4096
"""Requests that wait for the thread, of about 2 kB each."""

MAX_BATCH = 256
"""Lines of one write."""

CLOSE_S = 5.0

logger = logging.getLogger(__name__)


class LoadMeter(Meter):
    """Notes the reads of one request's load (``Run.meter``); whoever made it looks once the load
    has ended.

    ``begins`` and ``verified`` run on any thread, at times under an engine's lock, and append to
    lists, which needs no lock of its own.
    """

    __slots__ = ("_clock", "_reads", "checks")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._reads: list[TierLoad] = []  # each of one read
        self.checks: list[tuple[float, float]] = []  # begin and end

    def begins(self, tier: Tier, num_bytes: int) -> Callable[[Job], None]:
        begun_at = self._clock()

        def ended(job: Job) -> None:
            failed = [reason for reason, ok in zip(job.reasons, job.ok, strict=True) if not ok]
            num_asked = len(job.reasons)
            num_pages = num_asked - len(failed)
            read = TierLoad(
                tier=tier.value,
                at_s=begun_at,
                read_s=self._clock() - begun_at,
                num_reads=1,
                num_bytes=num_bytes * num_pages // max(1, num_asked),  # its pages are of one size
                failed=dict(Counter(reason.value for reason in failed)),
            )
            self._reads.append(read)

        return ended

    def verified(self, seconds: float) -> None:
        now = self._clock()
        self.checks.append((now - seconds, now))

    def tiers(self) -> list[TierLoad]:
        """Add up what has ended so far, by tier, in the order in which they were asked first."""
        found: dict[str, TierLoad] = {}
        for read in sorted(self._reads[:], key=lambda read: read.at_s):
            tier = found.get(read.tier)
            if tier is None:
                found[read.tier] = msgspec.structs.replace(read)
                continue
            tier.read_s = max(tier.read_s, read.at_s + read.read_s - tier.at_s)
            tier.num_reads += 1
            tier.num_bytes += read.num_bytes
            tier.failed = dict(Counter(tier.failed) + Counter(read.failed))
        if (nvme := found.get(Tier.NVME.value)) is not None:
            nvme.verify_s = sum(ended - began for began, ended in self.checks[:])
        return list(found.values())


@dataclass(slots=True, eq=False)
class Story:
    """One request. Until ``finish``, all moments of its line, the arrival too, are of the stories'
    clock, ``arrived_unix_s`` and ``total_s`` (its end) included."""

    line: RequestRecord
    req: Any = None  # SGLang's, once it is known
    queue_wait_s: float = 0.0  # as it was expected when it came
    num_new: int = 0  # tokens that memory lacks, as looked up
    spans: list[tuple[int, int]] = field(default_factory=list)  # of those, tier and number
    expected_s: dict[str, float] = field(default_factory=dict)  # of what is planned, by tier
    waits_for: Why | None = None  # beside its turn
    waiting_since: float | None = None  # in its turn
    meter: LoadMeter | None = None
    parts: list[Any] = field(default_factory=list)  # handles of parts of its load
    prefill_s_before: float | None = None  # of all batches until it was admitted
    is_prefilled: bool = False
    num_storage: int = 0  # tokens that SGLang counts as loaded, from whatever tier
    unix_minus_clock_s: float = 0.0
    told: set[tuple[str, float]] = field(default_factory=set)  # spans, by name and begin

    @classmethod
    def begins(cls, now: float) -> Story:
        """Begin one of a request of which nothing is known yet."""
        line = RequestRecord(
            v=VERSION, rid="", arrived_unix_s=now, end="", num_prompt_tokens=0, total_s=now
        )
        return cls(line)

    def stop_waiting(self, now: float) -> None:
        """End the wait that goes on, if one does."""
        if self.waiting_since is not None:
            why, began = self.waits_for or "others", self.waiting_since
            self.line.waits = (*self.line.waits, Wait(why=why, at_s=began, wait_s=now - began))
            self.waiting_since = None

    @property
    def may_load(self) -> bool:
        """Whether a load is that of its line: one of a request that was retracted is not."""
        plan = self.line.plan
        return self.line.admitted_s is None or (plan is not None and plan.is_both_ends)

    @property
    def num_planned(self) -> int:
        """Tokens that are to be loaded."""
        plan = self.line.plan
        if plan is None:
            return 0
        return plan.num_nvme_tokens + plan.num_object_tokens + plan.num_peer_tokens

    @property
    def load_s(self) -> float | None:
        """How long its load took; until it was given up, if it was before that had ended."""
        load, given_up = self.line.load, self.line.given_up
        if load is None or load.load_s is not None or given_up is None:
            return None if load is None else load.load_s
        return max(0.0, given_up.at_s - load.at_s)

    def tiers(self) -> list[TierLoad]:
        """Return what was read for it, by tier."""
        return [] if self.meter is None else self.meter.tiers()


def finish(story: Story, *, replica: int = 0) -> RequestRecord:
    """Return the line of a request that ended. Once, since it counts times from the arrival."""
    line, tiers, arrived_at = story.line, story.tiers(), story.line.arrived_unix_s
    line.replica = replica
    line.tokens = _sources(line, story.num_storage, tiers)
    parts: list[Any] = [line.lookup, line.plan, line.given_up, line.copy, line.prefill, *line.waits]
    if line.load is not None:
        line.load.load_s, line.load.num_tokens = story.load_s, story.num_planned
        line.load.tiers = tuple(tiers)
        for tier in tiers:
            tier.expected_s = story.expected_s.get(tier.tier, 0.0)
        parts += [line.load, *tiers]
    for part in parts:
        for name in () if part is None else part.__struct_fields__:
            if isinstance(value := getattr(part, name), float):
                is_moment = name.endswith("at_s")
                setattr(part, name, _s(value - arrived_at if is_moment else value))
    for name in ("admitted_s", "first_token_s", "total_s"):
        if (moment := getattr(line, name)) is not None:
            setattr(line, name, _s(moment - arrived_at))
    line.arrived_unix_s = round(arrived_at + story.unix_minus_clock_s, _DIGITS)
    return line


def _s(seconds: float) -> float:
    return round(max(0.0, seconds), _DIGITS) or NO_TIME


def _sources(line: RequestRecord, num_storage: int, tiers: Sequence[TierLoad]) -> Sources:
    """Return where its tokens came from. SGLang counts all tiers as one, so their tokens are shared
    out by the bytes that arrived."""
    num_bytes = sum(tier.num_bytes for tier in tiers)
    by_tier = {tier.tier: num_storage * tier.num_bytes // max(1, num_bytes) for tier in tiers}
    # What is left over is less than a page a tier, or all, if nothing was metered.
    nearest = next(iter(by_tier), Tier.NVME.value)
    by_tier[nearest] = by_tier.get(nearest, 0) + num_storage - sum(by_tier.values())
    num_device, num_host = line.tokens.num_device, line.tokens.num_host
    cached = num_device + num_host + num_storage
    return Sources(
        num_device=num_device,
        num_host=num_host,
        num_computed=max(0, line.num_prompt_tokens - cached) if line.admitted_s else 0,
        **{f"num_{name}": number for name, number in by_tier.items()},
    )


class LineWriter:
    """Adds lines to ``path``, which is renamed when it would outgrow ``max_bytes``. ``put`` and
    ``num_dropped`` are for one other thread. ``write`` is the system's."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        replica: int = 0,
        max_queued: int = MAX_QUEUED,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._replica = replica
        self._max_queued = max_queued
        self._write = write
        self._queue: queue.SimpleQueue[Story | None] = queue.SimpleQueue()
        self._log = OnceLog(logger)
        self._encoder = msgspec.json.Encoder()
        self._num_refused = 0  # as the queue was full
        self._num_lost = 0  # as the file could not be written
        self._thread = threading.Thread(target=self._run, name="tier-request-log", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Return how many lines were lost so far."""
        return self._num_refused + self._num_lost

    def put(self, story: Story) -> None:
        """Have a line written, unless too many wait for that. Never waits."""
        if self._queue.qsize() < self._max_queued:
            self._queue.put(story)
        else:
            self._num_refused += 1

    def close(self) -> None:
        """Write what waits, for a few seconds at most."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    # ---- The thread ----

    def _run(self) -> None:
        is_over = False
        while not is_over:
            ended = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(ended) < MAX_BATCH:
                    ended.append(self._queue.get_nowait())
            is_over = None in ended
            lines = [line for each in ended if each is not None and (line := self._line(each))]
            if lines:
                self._add(lines)

    def _line(self, story: Story) -> bytes:
        try:
            return self._encoder.encode(finish(story, replica=self._replica)) + b"\n"
        except Exception:
            self._num_lost += 1
            self._log.fault("line", "internal error in the line of a request, which is dropped")
            return b""

    def _add(self, lines: list[bytes]) -> None:
        try:
            self._append(b"".join(lines))
        except OSError as error:
            self._num_lost += len(lines)
            self._log.report(
                "write",
                "--tier-log-requests: %s cannot be written (%s); lines of requests are dropped and "
                "counted until it can",
                self._path,
                error.strerror or error,
            )
        else:
            self._log.settle("write")

    def _append(self, data: bytes) -> None:
        """Write to the file that has the name now: others may have moved it."""
        with self._opened() as (descriptor, size):
            if not size or size + len(data) <= self._max_bytes:
                self._write_whole(descriptor, size, data)
                return
        os.rename(self._path, older(self._path))
        with self._opened() as (descriptor, size):
            self._write_whole(descriptor, size, data)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[int, int]]:
        """Open the file; yield its descriptor and size."""
        descriptor = open_log(self._path)
        try:
            yield descriptor, os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _write_whole(self, descriptor: int, size: int, data: bytes) -> None:
        # Of a line that a killed process left half, so that the next one is whole. Not by its name,
        # which may be another file's, or a pipe's, by now.
        if size and os.pread(descriptor, 1, size - 1) not in (b"\n", b""):
            data = b"\n" + data
        view = memoryview(data)
        try:
            while view:
                view = view[self._write(descriptor, bytes(view)) :]
        except OSError:
            os.ftruncate(descriptor, size)  # no line is left half
            raise
