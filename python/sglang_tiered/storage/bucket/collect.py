"""What goes from a bucket: pages over age or beyond the cap, the erased, and namespaces that no
server uses any more. Any number of servers run one each, beside any number that write and read; it
can be killed at any moment and started again. A reader meets a deletion as a miss.

What it cannot do: ``obstore`` does not list multipart uploads that were never finished, so a bucket
needs its own lifecycle rule for them (AbortIncompleteMultipartUpload after a day).
"""

from __future__ import annotations

import logging
import math
import random
import time
from itertools import chain, islice
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.bucket.directory import STAGED
from sglang_tiered.storage.bucket.erased import BucketErasures, all_records, mergeable
from sglang_tiered.storage.bucket.names import ERASED, ROOT, Layout, namespace_of, parse_page
from sglang_tiered.storage.bucket.pins import alive, pin_share, read_pin, write_changed

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from sglang_tiered.storage.bucket.directory import Listed
    from sglang_tiered.storage.bucket.erased import Record
    from sglang_tiered.storage.bucket.requests import Requests
    from sglang_tiered.storage.region.pins import Pin


logger = logging.getLogger(__name__)

BUDGET = 100_000
"""What one run removes at most, beside pins."""

INTERVAL_S = 600.0
"""Between runs in the background, of all servers of a namespace together."""

_FIRST_RUN_S = 60.0
_DELETED_AT_ONCE = 1000
_DAY_S = 86_400.0

_UNUSED_S = 7 * _DAY_S
"""A namespace that no server has collected or written to for so long goes, or for the age of its
pages where that is longer."""

_RECORD_S = 30 * _DAY_S
"""An erasure is remembered so long, or as long as a namespace is kept, where that is longer: a
server that was off for longer may still hold pages."""

_STAGED_S = 6 * 3600.0
"""Files of a directory whose writer died go after this."""

_MERGED_S = 600.0
"""Records of pages older than this become one, where there are many."""


class Removal(msgspec.Struct):
    path: str
    kind: str  # page, pin, erasure, staged file, old namespace
    nbytes: int
    reason: str
    is_done: bool = False


class CollectorReport(msgspec.Struct):
    """What one run saw and did."""

    num_pages: int = 0
    page_bytes: int = 0  # as listed, before anything was removed
    num_foreign: int = 0  # foreign names; left alone
    num_unreadable: int = 0  # erasures and pins that do not verify; left alone
    num_removed: int = 0
    removed_bytes: int = 0
    is_complete: bool = True  # false: the budget ended it
    seconds: float = 0.0
    removals: list[Removal] = msgspec.field(default_factory=list)


class Collector:
    """Collects namespaces of a bucket, one at a time: pages older than ``ttl_s`` go, and the oldest
    beyond ``capacity_bytes``. Every method blocks on the network: not for a scheduler thread.
    ``clock``: the time in seconds since 1970; by default the store's own."""

    def __init__(
        self,
        requests: Requests,
        *,
        capacity_bytes: int | None = None,
        ttl_s: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._requests = requests
        self._capacity_bytes = capacity_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._unused_s = max(_UNUSED_S, ttl_s or 0.0)
        self.last: CollectorReport | None = None  # of the last run that was complete

    def run_once(
        self,
        namespace: bytes,
        *,
        delete: bool = True,
        is_server: bool = True,
        old_namespaces: bool = True,
    ) -> CollectorReport:
        """Remove at most ``BUDGET`` things and any pins, or only plan to. ``is_server``: one that
        uses the namespace, which says so there. ``old_namespaces``: remove those that no server
        uses, of all others. Raises ``BucketError``; whatever was done stands, and the next run goes
        on from there."""
        began = time.monotonic()
        self._layout, self._delete, self._report = Layout(namespace), delete, CollectorReport()
        report = self._report
        if delete and is_server:  # others wait for their turn, and see that the namespace is used
            self._requests.put(self._layout.collected, b"collected")
        if self._clock is not None:
            self._now = self._clock()
        else:  # the store's: the marker was written just now
            self._now = self._requests.modified(self._layout.collected) or time.time()
        found = self._found(old_namespaces=old_namespaces)
        room = BUDGET
        while batch := list(islice(found, min(room, _DELETED_AT_ONCE))):
            room -= len(batch)
            report.removals += batch
            if delete:
                self._requests.delete([removal.path for removal in batch])
                self._note_done(batch)
        report.is_complete = room > 0
        report.seconds = time.monotonic() - began
        if report.is_complete:
            self.last = report
        return report

    def _note_done(self, removals: list[Removal]) -> None:
        for removal in removals:
            removal.is_done = True
            self._report.num_removed += 1
            self._report.removed_bytes += removal.nbytes

    def run_in_background(self, stop: threading.Event, namespace: Callable[[], bytes]) -> None:
        """Collect until ``stop`` is set, and the requests closed, on a thread of the owner. Servers
        take turns."""
        log = OnceLog(logger)
        source = random.Random()  # of its own: servers are started with one seed
        wait_s = min(_FIRST_RUN_S, INTERVAL_S)
        while not stop.wait(wait_s * source.uniform(0.5, 1.5)):
            wait_s = INTERVAL_S
            try:
                self._take_turn(namespace())
            except Exception as error:  # of the network, or a bug: a server lives without it
                if not stop.is_set():
                    text = "object tier: collection failed (%s); it is retried"
                    log.report("collect", text, error)
            else:
                log.settle("collect")

    def _take_turn(self, namespace: bytes) -> None:
        """Collect until all is done, unless a server did within the interval."""
        modified = self._requests.modified(Layout(namespace).collected)
        now = time.time() if self._clock is None else self._clock()
        # A marker from ahead of this clock is no reason to wait for ever.
        is_over = modified is not None and 0 <= now - modified < INTERVAL_S
        while not is_over:
            report = self.run_once(namespace)
            is_over = report.is_complete
            if report.num_removed:
                logger.info(
                    "object tier: removed %d objects, %d bytes; %d pages were listed",
                    report.num_removed,
                    report.removed_bytes,
                    report.num_pages,
                )

    # ---- What goes ----

    def _found(self, *, old_namespaces: bool) -> Iterator[Removal]:
        """Yield what is to be removed, in this order."""
        records = all_records(self._requests)
        # What cannot be read says nothing of what to delete.
        self._erased = BucketErasures.of(records)
        self._report.num_unreadable += sum(record.what is None for record in records)
        self._pinned = self._look_at_pins()
        yield from self._pages()
        yield from self._old_records(records)
        if self._requests.directory is not None:  # it shows what writers never finished
            for each in chain(self._listing(self._layout.folder), self._listing(ERASED)):
                if STAGED in each.path and self._now - each.modified > _STAGED_S:
                    reason = "its writer never finished it"
                    yield Removal(each.path, "staged file", each.size, reason)
        if old_namespaces:
            yield from self._old_namespaces()

    def _listing(self, folder: str) -> Iterator[Listed]:
        return chain.from_iterable(self._requests.listing(folder))

    def _look_at_pins(self) -> set[bytes]:
        """Return what is pinned. What is over, or was erased of a pin, goes as soon as that is
        read, before its owner changes it."""

        def clean(listed: Listed) -> tuple[Listed, Pin | None, Pin | None]:
            found = read_pin(self._requests, self._layout, listed)
            if found is None:
                return listed, None, None
            pin = alive(*found, self._erased, self._layout.namespace)
            if pin is not None and self._is_over(pin):
                pin = None
            if self._delete:
                write_changed(self._requests, listed, found, pin)
            return listed, found[0], pin

        pinned = set[bytes]()
        for listed, found, pin in self._requests.each(clean, self._listing(self._layout.pins)):
            if found is None:
                self._report.num_unreadable += 1
            elif pin is not None:
                pinned.update(pin.keys)
            else:
                reason = "it is over" if self._is_over(found) else "its pages were erased"
                removal = Removal(listed.path, "pin", listed.size, reason)
                self._report.removals.append(removal)
                self._note_done([removal] if self._delete else [])
        return pinned

    def _is_over(self, pin: Pin) -> bool:
        return pin.until_s is not None and pin.until_s <= self._now

    def _keeps(self, key: bytes, nbytes: int) -> bool:
        """Return whether a page stays for a pin: the oldest do, up to what pins may keep."""
        if key not in self._pinned:
            return False
        self._left_bytes -= nbytes
        return self._left_bytes >= 0

    def _pages(self) -> Iterator[Removal]:
        """Yield what is erased or over age, then the oldest beyond the cap: a listing begins with
        them."""
        report, num_bytes, gone = self._report, 0, set[str]()
        for path, nbytes, modified, _ in self._begin_pages():
            name = parse_page(path)
            if name is None:
                report.num_foreign += 1
                continue
            report.num_pages += 1
            report.page_bytes += nbytes
            if self._erased.kills(self._layout.namespace, name.tenant, name.key, name.stamp):
                reason = "it was erased"
            elif self._keeps(name.key, nbytes) or self._now - modified <= (self._ttl_s or math.inf):
                num_bytes += nbytes
                continue
            else:
                reason = "it is too old"
            gone.add(path)
            yield Removal(path, "page", nbytes, reason)
        capacity = math.inf if self._capacity_bytes is None else self._capacity_bytes
        if num_bytes <= capacity:
            return
        for path, nbytes, _, _ in self._begin_pages():
            name = parse_page(path)
            if name is None or path in gone or self._keeps(name.key, nbytes):
                continue
            yield Removal(path, "page", nbytes, "the namespace is beyond its cap")
            num_bytes -= nbytes
            if num_bytes <= capacity:
                return

    def _begin_pages(self) -> Iterator[Listed]:
        self._left_bytes = pin_share(self._capacity_bytes)
        return self._listing(self._layout.pages)

    def _old_records(self, records: list[Record]) -> Iterator[Removal]:
        """Yield old records, and what is merged into one where there are many, but never the last:
        its number is where the next goes on from. Whoever dies between leaves some twice, which
        harms nothing."""
        last = max((record.number for record in records), default=0)
        lasts = {record.path for record in records if record.number == last}
        times: dict[str, float] = {}  # of the youngest in each object
        for record in records:
            if record.path not in lasts and (record.what is None or not record.what.is_empty):
                times[record.path] = max(times.get(record.path, 0.0), record.modified)
        # No page may outlive the record of its erasure, in a namespace that is not used either.
        oldest_s = self._now - max(_RECORD_S, self._unused_s)
        for path in [path for path, at in times.items() if at < oldest_s]:
            del times[path]
            yield Removal(path, "erasure", 0, "every server has applied it")
        settled_s = self._now - _MERGED_S
        settled = [record for record in records if times.get(record.path, self._now) < settled_s]
        for path, data, replaced in mergeable(settled, oldest_s):
            if self._delete:
                self._requests.put(path, data)
            for each in replaced:
                yield Removal(each, "erasure", 0, "it is merged with others")

    def _old_namespaces(self) -> Iterator[Removal]:
        """Yield what no server has written to, or collected, for long."""
        for folder in self._requests.folders(ROOT):
            namespace = namespace_of(folder)
            if namespace in (None, self._layout.namespace):
                continue
            collected = self._requests.modified(Layout(namespace or b"").collected)
            if collected is not None and self._now - collected <= self._unused_s:
                continue
            found = list(self._listing(folder))
            if found and self._now - max(each.modified for each in found) > self._unused_s:
                for each in found:
                    reason = "no server uses its namespace"
                    yield Removal(each.path, "old namespace", each.size, reason)
