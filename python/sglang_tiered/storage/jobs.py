"""Jobs of a tier: the book of those under way, loads whose pages several holders have, and the
threads that work at them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from sglang_tiered.metrics import Durations
from sglang_tiered.storage.base import Job, JobKind, Reason, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sglang_tiered.storage.base import Erasure


logger = logging.getLogger(__name__)

_Holder = TypeVar("_Holder")

_INTERNAL_ERROR = "internal error while loading; pages not yet read are misses"
_MAY_BE_ELSEWHERE = (Reason.MISS, Reason.CORRUPT, Reason.IO_ERROR)
_MIN_AGAIN_S = 0.002  # nobody else is asked for less


_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def selects(what: Erasure | None) -> Callable[[Iterable[bytes], bytes], bool]:
    """Return what says of keys and their tenant whether an erasure (None: of everything) names one
    of them."""
    if what is not None and what.keys is not None:
        gone = frozenset(what.keys)
        return lambda keys, _: not gone.isdisjoint(keys)
    tenant = None if what is None else what.tenant
    return lambda _, of: tenant in (None, of)


class JobBook:
    """Jobs under way, and counts of past outcomes. The caller holds its owner's lock."""

    def __init__(self) -> None:
        self._inflight: dict[Job, float] = {}  # in order of submission, with its time
        self.store_durations = Durations()  # of jobs that made a page durable
        self.outcomes: Counter[tuple[JobKind, Reason]] = Counter()  # of pages

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def inflight(self) -> list[Job]:
        return list(self._inflight)

    def about(self, what: Erasure) -> list[Job]:
        """Return those under way that may have pages which an erasure names."""
        names, is_of_any = selects(what), what.keys is None  # a load names no tenant
        return [
            job
            for job in self._inflight
            if (is_of_any and job.kind is JobKind.LOAD) or names(job.run.keys, job.run.tenant)
        ]

    def open(self, kind: JobKind, run: Run) -> Job:
        job = Job(kind, run)
        self._inflight[job] = time.monotonic()
        return job

    def note_end(self, job: Job) -> None:
        """Count the outcomes of a job that is about to be finished."""
        self.outcomes.update((job.kind, reason) for reason in job.reasons)
        submitted_at = self._inflight.pop(job)
        if job.kind is JobKind.STORE and Reason.OK in job.reasons:
            self.store_durations.record(time.monotonic() - submitted_at)

    def finish(self, job: Job) -> None:
        """Count the outcomes, then let the caller have the buffers back."""
        self.note_end(job)
        job.finish()

    def finish_with(self, job: Job, positions: Iterable[int], reason: Reason) -> None:
        for position in positions:
            job.reasons[position] = reason
        self.finish(job)


@dataclass(slots=True, eq=False)
class LoadPart(Generic[_Holder]):
    """Pages that one holder is asked for."""

    load: SplitLoad[_Holder]
    holder: _Holder
    run: Run  # of these pages
    positions: Sequence[int]  # in the run of the load
    failed: frozenset[_Holder]  # these could not serve them


@dataclass(slots=True, eq=False)
class SplitLoad(Generic[_Holder]):
    """One load whose pages are each asked of one holder. One that a holder turns out not to have
    whole (damaged, unreadable, gone meanwhile) is asked of another, while the deadline allows. The
    job ends when the last part has ended, so no thread touches its buffers afterwards.

    ``find`` says for each key whom to ask, but for those who failed. ``read`` begins a part in
    so many seconds, or raises with nothing begun; whoever reads calls ``end`` after the last touch
    of its pages. ``over`` is called just before the caller may know. None of them may block. A part
    has ``most_pages`` and ``most_bytes``, or is of one page."""

    job: Job
    clock: Callable[[], float]
    deadline: float | None  # of the clock
    find: Callable[[Sequence[bytes], frozenset[_Holder]], Sequence[_Holder | None]]
    read: Callable[[LoadPart[_Holder], float | None], None]
    over: Callable[[Job], None]
    most_pages: float = math.inf
    most_bytes: float = math.inf
    _num_left: int = 1  # parts under way, and who asks for more
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Ask for all pages; one without a holder is a miss. Raises nothing: parts may be under
        way."""
        self.job.reasons = [Reason.MISS] * self.job.run.num_pages
        try:
            self._ask(range(self.job.run.num_pages), frozenset())
        except Exception:
            logger.exception(_INTERNAL_ERROR)
        self._settle()

    def end(
        self,
        part: LoadPart[_Holder],
        reasons: Sequence[Reason],
        learn: Callable[[], None] = lambda: None,
    ) -> None:
        """Note how a part ended, and ``learn`` from that while the pages are still the load's; then
        ask others for what failed."""
        try:
            for position, reason in zip(part.positions, reasons, strict=True):
                self.job.reasons[position] = reason
            learn()
            again = [i for i in part.positions if self.job.reasons[i] in _MAY_BE_ELSEWHERE]
            left_s = self._left_s()
            if again and (left_s is None or left_s >= _MIN_AGAIN_S):
                self._ask(again, part.failed | {part.holder})
        except Exception:
            logger.exception(_INTERNAL_ERROR)
        self._settle()

    def _ask(self, positions: Sequence[int], failed: frozenset[_Holder]) -> None:
        run = self.job.run
        groups: dict[_Holder, list[int]] = {}
        found = self.find([run.keys[i] for i in positions], failed)
        for position, holder in zip(positions, found, strict=True):
            if holder is not None:
                groups.setdefault(holder, []).append(position)
        parts = [(holder, some) for holder, group in groups.items() for some in self._cut(group)]
        for holder, some in parts:
            part = LoadPart(self, holder, _select(run, some), some, failed)
            with self._lock:
                self._num_left += 1
            try:
                self.read(part, self._left_s())
            except Exception:
                logger.exception(_INTERNAL_ERROR)
                self.end(part, [Reason.IO_ERROR] * len(some))

    def _cut(self, positions: list[int]) -> list[list[int]]:
        parts: list[list[int]] = [[]]
        num_bytes = 0  # of the last part
        for position in positions:
            size = sum(part.nbytes for part in self.job.run.pages[position])
            is_full = num_bytes + size > self.most_bytes or len(parts[-1]) >= self.most_pages
            if parts[-1] and is_full:
                parts.append([])
                num_bytes = 0
            parts[-1].append(position)
            num_bytes += size
        return parts

    def _left_s(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - self.clock())

    def _settle(self) -> None:
        with self._lock:
            self._num_left -= 1
            if self._num_left:
                return
        self.over(self.job)
        self.job.finish()


def _select(run: Run, positions: Sequence[int]) -> Run:
    if len(positions) == run.num_pages:
        return run
    keys = tuple(run.keys[i] for i in positions)
    return Run(keys, tuple(run.pages[i] for i in positions), run.tenant, run.meter)


class Workers:
    """Threads that end when their engine is closed, or with the process. Of one thread."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, name: str, run: Callable[[], None], count: int | None = None) -> None:
        """Start a thread, or ``count`` of them with numbers in their names."""
        names = [name] if count is None else [f"{name}-{number}" for number in range(count)]
        for each in names:
            thread = threading.Thread(target=run, name=each, daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for their end; false where one is still at work after that time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)


def call_each(
    call: Callable[[_Item], _Found], items: Sequence[_Item], num_threads: int
) -> list[Future[_Found]]:
    """Call for each item, on threads that the end of the process does not wait for, as it does for
    those of a ``ThreadPoolExecutor``. What is cancelled in time is not called."""
    futures: list[Future[_Found]] = [Future() for _ in items]
    rest = iter(list(zip(items, futures, strict=True)))

    def work() -> None:
        for item, future in rest:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(item))
                except BaseException as error:
                    future.set_exception(error)

    for _ in range(min(num_threads, len(items))):
        threading.Thread(target=work, daemon=True).start()
    return futures
