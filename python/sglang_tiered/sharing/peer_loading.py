"""Loads from other servers: each page is fetched from one holder, or from a second if that fails.

A job ends when every part of it has ended, and a part ends on the page client's thread, after the
last touch of its pages. Misses and failures of a server go to the mirror, so that the next load
avoids them.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.sharing.pages.landing import PageOutcome
from sglang_tiered.storage.base import JobKind, Reason
from sglang_tiered.storage.jobs import JobBook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.sharing.mirror import Mirror, Peer
    from sglang_tiered.sharing.pages.client import PageClient
    from sglang_tiered.sharing.pages.landing import PageFetch
    from sglang_tiered.storage.base import Job, Run

__all__ = ["PeerLoader"]

logger = logging.getLogger(__name__)

_BUSY_S = 0.2  # a holder that has too much to do is left alone for so long
_FIRST_AVOID_S = 0.5  # one that does not answer; twice as long each time
_MAX_AVOID_S = 30.0
_MAX_SILENT = 1024
_MIN_SECOND_S = 0.002  # a second holder is not asked for less

_REASONS = {
    PageOutcome.OK: Reason.OK,
    PageOutcome.MISS: Reason.MISS,
    PageOutcome.BUSY: Reason.MISS,
    PageOutcome.DAMAGED: Reason.CORRUPT,
    PageOutcome.LOST: Reason.IO_ERROR,
    PageOutcome.LATE: Reason.IO_ERROR,
    PageOutcome.CANCELLED: Reason.CANCELLED,
}
_ASK_ANOTHER = {PageOutcome.MISS, PageOutcome.BUSY, PageOutcome.DAMAGED, PageOutcome.LOST}


@dataclass(eq=False, slots=True)
class _PeerLoad:
    job: Job
    namespace: bytes
    deadline: float | None  # of the loader's clock
    num_left: int = 1  # parts under way, and the submission itself
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(eq=False, slots=True)
class _PeerPart:
    load: _PeerLoad
    peer: Peer
    positions: list[int]
    is_second: bool


class PeerLoader:
    """``submit`` from any thread, memory only. Does not own what it works with."""

    def __init__(self, mirror: Mirror, client: PageClient, clock: Callable[[], float]) -> None:
        self._mirror = mirror
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()  # a leaf
        self._jobs = JobBook()
        self._silent: dict[str, int] = {}  # servers that do not answer, and how often
        self._closed = False
        self.num_recovered = 0  # pages that a second server had; the client's thread only

    def submit(self, run: Run, namespace: bytes, *, deadline_s: float | None) -> Job:
        """See ``PeerTier.submit_load``."""
        with self._lock:
            job = self._jobs.open(JobKind.LOAD, run)
            closed = self._closed
        deadline = None if deadline_s is None else self._clock() + deadline_s
        load = _PeerLoad(job, namespace, deadline)
        if not closed:
            job.reasons = [Reason.MISS] * run.num_pages
            if deadline_s is None or deadline_s > 0:
                self._ask(load, range(run.num_pages), second_to=None)
        self._settle(load)
        return job

    @property
    def num_inflight(self) -> int:
        with self._lock:
            return self._jobs.num_inflight

    def close(self) -> None:
        """Stop fetching. Loads under way end with the client."""
        with self._lock:
            self._closed = True

    def _ask(self, load: _PeerLoad, positions: Sequence[int], *, second_to: Peer | None) -> None:
        """Fetch each page from the holder that the mirror finds, except from ``second_to``."""
        run = load.job.run
        groups: dict[Peer, list[int]] = {}
        found = self._mirror.find([run.keys[i] for i in positions])
        for position, peer in zip(positions, found, strict=True):
            if peer is not None and (second_to is None or peer.server != second_to.server):
                groups.setdefault(peer, []).append(position)
        with load.lock:
            load.num_left += len(groups)
        for peer, group in groups.items():
            part = _PeerPart(load, peer, group, second_to is not None)
            self._client.fetch(
                peer.address,
                load.namespace,
                [run.keys[i] for i in group],
                [run.pages[i] for i in group],
                deadline_s=self._left_s(load),
                done=partial(self._part_ended, part),
            )

    def _left_s(self, load: _PeerLoad) -> float | None:
        return None if load.deadline is None else max(0.0, load.deadline - self._clock())

    def _settle(self, load: _PeerLoad) -> None:
        with load.lock:
            load.num_left -= 1
            if load.num_left:
                return
        with self._lock:
            self._jobs.note_end(load.job)
        load.job.finish()

    # ---- The client's thread ----

    def _part_ended(self, part: _PeerPart, fetch: PageFetch) -> None:
        try:
            self._note(part, fetch)
        except Exception:
            logger.exception("internal error in a load from other servers; its pages are misses")
        self._settle(part.load)

    def _note(self, part: _PeerPart, fetch: PageFetch) -> None:
        job = part.load.job
        for position, outcome in zip(part.positions, fetch.outcomes, strict=True):
            job.reasons[position] = _REASONS[outcome]
        if part.is_second:
            self.num_recovered += fetch.outcomes.count(PageOutcome.OK)
        self._tell_mirror(part, fetch)
        again = [
            position
            for position, outcome in zip(part.positions, fetch.outcomes, strict=True)
            if outcome in _ASK_ANOTHER
        ]
        left_s = self._left_s(part.load)
        in_time = left_s is None or left_s >= _MIN_SECOND_S
        if again and in_time and not (part.is_second or self._closed):
            self._ask(part.load, again, second_to=part.peer)

    def _tell_mirror(self, part: _PeerPart, fetch: PageFetch) -> None:
        seen = set(fetch.outcomes)
        lacking = [
            key
            for key, outcome in zip(fetch.keys, fetch.outcomes, strict=True)
            if outcome in (PageOutcome.MISS, PageOutcome.DAMAGED)
        ]
        if lacking:
            self._mirror.lacks(part.peer.server, lacking)
        if fetch.num_heard:
            self._silent.pop(part.peer.server, None)
        if PageOutcome.LOST in seen or (PageOutcome.LATE in seen and not fetch.num_heard):
            if len(self._silent) >= _MAX_SILENT:
                self._silent.clear()
            times = self._silent.get(part.peer.server, 0)
            self._silent[part.peer.server] = times + 1
            self._mirror.avoid(
                part.peer.server, min(_FIRST_AVOID_S * 2.0 ** min(times, 6), _MAX_AVOID_S)
            )
        elif PageOutcome.BUSY in seen:
            self._mirror.avoid(part.peer.server, _BUSY_S)
