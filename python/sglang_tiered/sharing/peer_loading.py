"""Loads from other servers: each page is fetched from one holder, or from a second if that fails.

Parts end on the page client's thread. Misses and failures of a server go to the mirror, so that the
next load avoids them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.sharing.pages.landing import PageOutcome
from sglang_tiered.storage.base import Job, JobKind, Reason
from sglang_tiered.storage.jobs import LoadPart, SplitLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.sharing.mirror import Mirror, Peer
    from sglang_tiered.sharing.pages.client import PageClient
    from sglang_tiered.sharing.pages.landing import PageFetch
    from sglang_tiered.storage.base import Run

__all__ = ["PeerLoader"]

_BUSY_S = 0.2  # a holder that has too much to do is left alone for so long
_FIRST_AVOID_S = 0.5  # one that does not answer; twice as long each time
_MAX_AVOID_S = 30.0
_MAX_SILENT = 1024

_REASONS = {
    PageOutcome.OK: Reason.OK,
    PageOutcome.MISS: Reason.MISS,
    PageOutcome.BUSY: Reason.MISS,
    PageOutcome.DAMAGED: Reason.CORRUPT,
    PageOutcome.LOST: Reason.IO_ERROR,
    PageOutcome.LATE: Reason.IO_ERROR,
    PageOutcome.CANCELLED: Reason.CANCELLED,
}


class PeerLoader:
    """``submit`` from any thread, memory only. Does not own what it works with."""

    def __init__(self, mirror: Mirror, client: PageClient, clock: Callable[[], float]) -> None:
        self._mirror = mirror
        self._client = client
        self._clock = clock
        self._inflight: set[Job] = set()
        self._silent: dict[str, int] = {}  # servers that do not answer, and how often
        self._closed = False
        self.num_recovered = 0  # pages that a second server had; the client's thread only

    def submit(self, run: Run, namespace: bytes, *, deadline_s: float | None) -> Job:
        """See ``PeerTier.submit_load``."""
        job = Job(JobKind.LOAD, run)
        if self._closed:
            job.finish()
            return job
        self._inflight.add(job)
        deadline = None if deadline_s is None else self._clock() + deadline_s
        read = partial(self._fetch, namespace)
        SplitLoad(job, self._clock, deadline, self._find, read, self._inflight.discard).begin()
        return job

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    def close(self) -> None:
        """Stop fetching. Loads under way end with the client."""
        self._closed = True

    def _find(self, keys: Sequence[bytes], failed: frozenset[Peer]) -> list[Peer | None]:
        """Find holders in the mirror, but never the same again, nor a third."""
        if self._closed or len(failed) > 1:
            return [None] * len(keys)
        away = {peer.server for peer in failed}
        found = self._mirror.find(keys)
        return [None if peer is None or peer.server in away else peer for peer in found]

    def _fetch(self, namespace: bytes, part: LoadPart[Peer], left_s: float | None) -> None:
        if left_s == 0.0:  # nobody is blamed for that
            part.load.end(part, [Reason.MISS] * part.run.num_pages)
            return
        self._client.fetch(
            part.holder.address,
            namespace,
            part.run.keys,
            part.run.pages,
            deadline_s=left_s,
            done=partial(self._fetched, part),
        )

    # ---- The client's thread ----

    def _fetched(self, part: LoadPart[Peer], fetch: PageFetch) -> None:
        reasons = [_REASONS[outcome] for outcome in fetch.outcomes]
        part.load.end(part, reasons, partial(self._learn, part, fetch))

    def _learn(self, part: LoadPart[Peer], fetch: PageFetch) -> None:
        server, seen = part.holder.server, set(fetch.outcomes)
        if part.failed:
            self.num_recovered += fetch.outcomes.count(PageOutcome.OK)
        lacking = [
            key
            for key, outcome in zip(fetch.keys, fetch.outcomes, strict=True)
            if outcome in (PageOutcome.MISS, PageOutcome.DAMAGED)
        ]
        if lacking:
            self._mirror.lacks(server, lacking)
        if fetch.num_heard:
            self._silent.pop(server, None)
        if PageOutcome.LOST in seen or (PageOutcome.LATE in seen and not fetch.num_heard):
            if len(self._silent) >= _MAX_SILENT:
                self._silent.clear()
            times = self._silent.get(server, 0)
            self._silent[server] = times + 1
            self._mirror.avoid(server, min(_FIRST_AVOID_S * 2.0**times, _MAX_AVOID_S))
        elif PageOutcome.BUSY in seen:
            self._mirror.avoid(server, _BUSY_S)
