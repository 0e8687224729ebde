"""``PageClient``: asks page servers for pages, straight into the caller's buffers.

One thread owns every connection, copies what arrives and ends every fetch, so nothing lands for a
fetch that has ended. The bytes asked for are bounded, over all servers and for each: that is the
flow control.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import zmq

from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.link import PageFetch, PageLink, PageOutcome
from sglang_tiered.sharing.pages.messages import MAX_PAGE_BYTES, MAX_REQUEST_PAGES
from sglang_tiered.sharing.settings import PageSettings
from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.jobs import LoadPart, SplitLoad
from sglang_tiered.wire.loop import EndpointLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.base import Job, Run
    from sglang_tiered.wire.keys import Keys


logger = logging.getLogger(__name__)

_MIN_WAIT_S = 0.0005


_REASONS = {
    PageOutcome.OK: Reason.OK,
    PageOutcome.MISS: Reason.MISS,
    PageOutcome.BUSY: Reason.MISS,
    PageOutcome.DAMAGED: Reason.CORRUPT,
    PageOutcome.LOST: Reason.IO_ERROR,
    PageOutcome.LATE: Reason.IO_ERROR,
    PageOutcome.CANCELLED: Reason.CANCELLED,
}


class PageClient:
    """``load`` and ``fetch`` may be called from any thread and never block; ``clock`` times
    everything. Counts are written by the client's thread only."""

    def __init__(
        self,
        settings: PageSettings | None = None,
        *,
        keys: Keys | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings or PageSettings()
        self._keys = keys
        self._clock = clock
        self.num_requests = 0
        self.num_bytes = 0  # of pages that were verified
        self.outcomes: Counter[PageOutcome] = Counter()  # pages
        self.num_breaches = 0  # links ended for a breach of the protocol
        self.num_unasked = 0  # answers without an open request
        self.num_overdue = 0  # answers to requests that had ended
        self.num_links_lost = 0
        self._lock = threading.Lock()  # guards ``_closed`` and the calls queued before it
        self._closed = False
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._links: dict[str, PageLink] = {}
        self._fetches: set[PageFetch] = set()
        self._numbers = itertools.count(1)
        self._loop = EndpointLoop("tier-page-client", self._step, self._tick)
        self._loop.start()

    def load(
        self,
        job: Job,
        namespace: bytes,
        find: Callable[[Sequence[bytes], frozenset[str]], Sequence[str | None]],
        *,
        deadline_s: float | None,
        learn: Callable[[LoadPart[str], PageFetch], None],
        over: Callable[[Job], None],
    ) -> None:
        """Fill the pages of a job, at most ``deadline_s`` from now, each from the address that
        ``find`` names. See ``SplitLoad``; ``learn`` is told how each part ended, on the client's
        thread."""
        deadline = None if deadline_s is None else self._clock() + deadline_s

        def read(part: LoadPart[str], left_s: float | None) -> None:
            if left_s == 0.0:  # nobody is blamed for that
                part.load.end(part, [Reason.MISS] * part.run.num_pages)
            else:
                self.fetch(part.holder, namespace, part.run, deadline, partial(fetched, part))

        def fetched(part: LoadPart[str], fetch: PageFetch) -> None:
            reasons = [_REASONS[outcome] for outcome in fetch.outcomes]
            part.load.end(part, reasons, partial(learn, part, fetch))

        SplitLoad(
            job,
            self._clock,
            deadline,
            find,
            read,
            over,
            most_pages=MAX_REQUEST_PAGES,
            most_bytes=self._settings.request_bytes,
        ).begin()

    def fetch(
        self,
        address: str,
        namespace: bytes,
        run: Run,
        deadline: float | None,
        done: Callable[[PageFetch], None],
    ) -> None:
        """Fill a run with the pages that the server at ``address`` holds, by one request: what no
        message can name is a miss. ``done`` is called at the end, at the latest at ``deadline`` of
        the clock; it must not block."""
        fetch = PageFetch(address, namespace, run, deadline, done)
        with self._lock:
            if not self._closed:
                self._loop.call(self._start_fetch, fetch)
                return
        fetch.outcomes = [PageOutcome.CANCELLED] * run.num_pages
        fetch.end()

    @property
    def num_links(self) -> int:
        return len(self._links)

    @property
    def num_fetches(self) -> int:
        return len(self._fetches)

    def close(self) -> None:
        """End every fetch, then the thread. Idempotent; from any thread but the client's."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call(self._end_all)
        self._loop.stop()
        if self._owns_context:
            self._context.destroy(linger=0)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not balance. Call while nothing is fetched."""
        assert not self._fetches, f"{len(self._fetches)} fetches under way"
        left = sum(len(link.waiting) for link in self._links.values())
        assert not left, f"{left} requests wait without a fetch"

    # ---- The client's thread ----

    def _start_fetch(self, fetch: PageFetch) -> None:
        self._fetches.add(fetch)
        try:
            if fetch.num_bytes > MAX_PAGE_BYTES:
                self._end(fetch, PageOutcome.MISS)
            elif (link := self._link_to(fetch.address)) is None:
                self._end(fetch, PageOutcome.BUSY)
            else:
                link.waiting.append(fetch)
        except TransferError as error:
            logger.warning("cannot fetch pages of another server (%s); they are misses", error)
            self._end(fetch, PageOutcome.LOST)
        except Exception:
            logger.exception("internal error while asking for pages; they are misses")
            self._end(fetch, PageOutcome.LOST)

    def _link_to(self, address: str) -> PageLink | None:
        """The connection to a server, made if need be; None if ``max_links`` are in use."""
        link = self._links.get(address)
        if link is not None:
            return link
        if len(self._links) >= self._settings.max_links:
            idle = [link for link in self._links.values() if link.is_idle]
            if not idle:
                return None
            self._close(min(idle, key=lambda link: link.last_heard))
        link = self._links[address] = PageLink(
            self._loop,
            self._context,
            address,
            self._settings,
            self._keys,
            heard=self._hear,
            lost=self._lost,
            clock=self._clock,
        )
        return link

    def _step(self) -> float | None:
        now = self._clock()
        self._expire(now)
        self._send_some(now)
        deadlines = [each.deadline for each in self._fetches if each.deadline is not None]
        return max(min(deadlines) - now, _MIN_WAIT_S) if deadlines else None

    def _expire(self, now: float) -> None:
        for fetch in list(self._fetches):
            if fetch.deadline is not None and fetch.deadline <= now:
                link = self._links.get(fetch.address)
                fetch.is_silent = fetch.sent_at is not None and (
                    link is None or link.last_heard <= fetch.sent_at
                )
                self._end(fetch, PageOutcome.LATE)

    def _send_some(self, now: float) -> None:
        """Send requests while there is room, one of each server in turn."""
        links = list(self._links.values())
        asked = [each for link in links for each in link.open_requests.values()]
        wanted_bytes = sum(each.num_bytes for each in asked if each.is_open)
        sent = True
        while sent:
            sent = False
            for link in links:
                size = self._send_next(link, now) if self._may_send(link, wanted_bytes) else 0
                wanted_bytes += size
                sent = sent or size > 0
        for address in list(self._links)[:1]:  # another one is the first, next time
            self._links[address] = self._links.pop(address)

    def _may_send(self, link: PageLink, wanted_bytes: int) -> bool:
        """Whether the first request of a link fits beside what is asked for and still wanted.
        Without any other request, every size fits."""
        while link.waiting and not link.waiting[0].is_open:
            link.waiting.popleft()
        if not link.waiting or len(link.open_requests) >= self._settings.max_requests:
            return False
        size, window = link.waiting[0].num_bytes, self._settings.window_bytes
        owed_bytes = sum(each.num_bytes for each in link.open_requests.values())
        return (not wanted_bytes or wanted_bytes + size <= window) and (
            not owed_bytes or owed_bytes + size <= window // 2
        )

    def _send_next(self, link: PageLink, now: float) -> int:
        """Send the first request. Returns the bytes that it asks for, or 0 if it does not fit into
        the queue."""
        fetch, number = link.waiting[0], next(self._numbers)
        patience_s = 60.0 if fetch.deadline is None else max(fetch.deadline - now, 0.001)
        message = messages.Fetch(
            number,
            fetch.namespace,
            b"".join(fetch.keys),
            fetch.lengths,
            min(3_600_000, max(1, int(patience_s * 1000))),
        )
        if not link.send(message):
            return 0
        link.waiting.popleft()
        if not link.open_requests:
            link.last_heard = now  # its silence counts from now on
        fetch.sent_at = now
        link.open_requests[number] = fetch
        self.num_requests += 1
        return fetch.num_bytes

    def _hear(
        self, link: PageLink, message: messages.FromServer, payload: list[memoryview]
    ) -> None:
        if not isinstance(message, messages.Found | messages.Busy):
            raise TransferError("a page server answered what it was not asked.")
        fetch = link.open_requests.pop(message.number, None)
        if fetch is None:
            self.num_unasked += 1
            return
        if not fetch.is_open:
            self.num_overdue += 1
            return
        if isinstance(message, messages.Busy):
            self._end(fetch, PageOutcome.BUSY)
            return
        try:
            fetch.land(message, payload)
        except TransferError:
            self._end(fetch, PageOutcome.LOST)
            raise
        except Exception:
            logger.exception("internal error while receiving pages; they are misses")
            self._end(fetch, PageOutcome.LOST)
        else:
            self._end(fetch)
        self._expire(self._clock())  # however much arrives, from however many servers

    def _tick(self, now: float) -> None:
        now = self._clock()
        settings = self._settings
        for link in list(self._links.values()):
            link.check(settings.answer_timeout_s if link.open_requests else None)
            if not link.is_gone and link.is_idle and now - link.last_heard > settings.idle_s:
                self._close(link)

    def _end(self, fetch: PageFetch, outcome: PageOutcome | None = None) -> None:
        """End a fetch: no page of it lands from here on. ``outcome`` is that of all its pages; None
        if each has its own."""
        if not fetch.is_open:
            return
        self._fetches.discard(fetch)
        if outcome is not None:
            fetch.outcomes = [outcome] * len(fetch.keys)
        self.outcomes.update(fetch.outcomes)
        self.num_bytes += sum(
            length
            for length, became in zip(fetch.lengths, fetch.outcomes, strict=True)
            if became is PageOutcome.OK
        )
        try:
            fetch.end()
        except Exception:
            logger.exception("internal error in the callback of a fetch; the client goes on")

    def _lost(self, link: PageLink, reason: str, is_breach: bool) -> None:
        self.num_links_lost += 1
        self.num_breaches += is_breach
        logger.log(
            logging.DEBUG if link.is_idle else logging.WARNING,
            "connection to the page server %s lost (%s); its pages are misses",
            link.address,
            reason,
        )
        self._close(link)

    def _close(self, link: PageLink) -> None:
        link.close()
        del self._links[link.address]
        left = [*link.open_requests.values(), *link.waiting]
        link.open_requests.clear()
        link.waiting.clear()
        for fetch in left:
            self._end(fetch, PageOutcome.LOST)

    def _end_all(self) -> None:
        for fetch in list(self._fetches):
            self._end(fetch, PageOutcome.CANCELLED)
        for link in list(self._links.values()):
            self._close(link)
