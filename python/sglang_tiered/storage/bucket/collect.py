"""What goes from a bucket: pages over age or beyond the cap, the erased, and namespaces that no
server uses any more. Any number of servers run one each, beside any number that write and read; it
can be killed at any moment and started again. A reader meets a deletion as a miss.

What it cannot do: ``obstore`` does not list multipart uploads that were never finished, so a bucket
needs its own lifecycle rule for them (AbortIncompleteMultipartUpload after a day).
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.bucket.directory import STAGED
from sglang_tiered.storage.bucket.erased import BucketErasures, all_records, mergeable
from sglang_tiered.storage.bucket.names import (
    ERASED,
    ROOT,
    Layout,
    namespace_of,
    parse_page,
)
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
_FIRST_RUN_S = 60.0
_DELETED_AT_ONCE = 1000
_DAY_S = 86_400.0


class CollectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    capacity_bytes: int | None = None
    """Of all pages of the namespace; the oldest go beyond it."""

    ttl_s: float | None = None
    """Pages older than this go."""

    unused_s: float = 7 * _DAY_S
    """A namespace that no server has collected or written to for so long goes, or for ``ttl_s``
    where that is longer."""

    record_s: float = 30 * _DAY_S
    """An erasure is remembered so long, or as long as a namespace is kept, where that is longer: a
    server that was off for longer may still hold pages."""

    staged_s: float = 6 * 3600.0
    """Files of a directory whose writer died go after this."""

    merged_s: float = 600.0
    """Records of pages older than this become one, where there are many."""

    interval_s: float = 600.0
    """Between runs in the background, of all servers of a namespace together."""


class Removal(msgspec.Struct):
    path: str
    kind: str  # page, pin, erasure, staged file, old namespace
    nbytes: int
    reason: str
    is_done: bool = False


class CollectorReport(msgspec.Struct):
    """What one run saw and did. ``removals`` holds at most the run's budget, and
    pins."""

    num_pages: int = 0
    page_bytes: int = 0  # as listed, before anything was removed
    num_foreign: int = 0  # foreign names; left alone
    num_unreadable: int = 0  # erasures and pins that do not verify; left alone
    num_removed: int = 0
    removed_bytes: int = 0
    is_complete: bool = True  # false: the budget ended it
    seconds: float = 0.0
    removals: list[Removal] = msgspec.field(default_factory=list)


class _Enough(Exception):  # noqa: N818
    """Raised when the budget is spent."""


class Collector:
    """Collects namespaces of a bucket, one at a time. Every method blocks on the network: not for a
    scheduler thread. ``clock``: the time in seconds since 1970; by default the store's own."""

    def __init__(
        self,
        requests: Requests,
        settings: CollectorSettings,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.requests = requests
        self.settings = settings
        self._clock = clock
        self._unused_s = max(settings.unused_s, settings.ttl_s or 0.0)
        self.last: CollectorReport | None = None  # of the last run that was complete

    def run_once(
        self,
        namespace: bytes,
        budget: int | None = None,
        *,
        delete: bool = True,
        is_server: bool = True,
        old_namespaces: bool = True,
    ) -> CollectorReport:
        """Remove at most ``budget`` things (100,000 by default) and any pins, or only plan to.
        ``is_server``: one that uses the namespace, which says so there. ``old_namespaces``: remove
        those that no server uses, of all others. Raises ``RequestError``; whatever was done stands,
        and the next run goes on from there."""
        began = time.monotonic()
        self._layout, self._delete, self._budget = Layout(namespace), delete, budget or BUDGET
        self._pinned: set[bytes] = set()
        self._batch: list[Removal] = []
        self._report = report = CollectorReport()
        if delete and is_server:  # others wait for their turn, and see that the namespace is used
            self.requests.put(self._layout.collected, b"collected")
        if self._clock is not None:
            self._now = self._clock()
        else:  # the store's: the marker was written just now
            self._now = self.requests.modified(self._layout.collected) or time.time()
        try:
            records = all_records(self.requests)
            # What cannot be read says nothing of what to delete.
            self._erased = BucketErasures.of(records)
            report.num_unreadable += sum(record.what is None for record in records)
            self._look_at_pins()
            self._hold_the_cap(self._look_at_pages())
            self._remove_records(records)
            self._remove_staged()
            if old_namespaces:
                self._remove_old_namespaces()
        except _Enough:
            report.is_complete = False
        self._remove_batch()
        report.seconds = time.monotonic() - began
        if report.is_complete:
            self.last = report
        return report

    def _is_due(self, namespace: bytes) -> bool:
        """Return whether no server collected the namespace within the interval."""
        modified = self.requests.modified(Layout(namespace).collected)
        now = time.time() if self._clock is None else self._clock()
        # A marker from ahead of this clock is no reason to wait for ever.
        return modified is None or not 0 <= now - modified < self.settings.interval_s

    def run_in_background(self, stop: threading.Event, namespace: Callable[[], bytes]) -> None:
        """Collect until ``stop`` is set, and the requests closed, on a thread of the owner. Servers
        take turns."""
        log = OnceLog(logger)
        source = random.Random()
        wait_s = min(_FIRST_RUN_S, self.settings.interval_s)
        while not stop.wait(wait_s * source.uniform(0.5, 1.5)):
            wait_s = self.settings.interval_s
            try:
                name = namespace()
                if not self._is_due(name):
                    continue
                is_over = False
                while not is_over:
                    report = self.run_once(name)
                    is_over = report.is_complete
                    if report.num_removed:
                        logger.info(
                            "object tier: removed %d objects, %d bytes; %d pages were listed",
                            report.num_removed,
                            report.removed_bytes,
                            report.num_pages,
                        )
            except Exception as error:  # of the network, or a bug: a server lives without it
                if not stop.is_set():
                    text = "object tier: collection failed (%s); it is retried"
                    log.report("collect", text, error)
                continue
            log.settle("collect")

    def _listing(self, folder: str) -> Iterator[Listed]:
        return itertools.chain.from_iterable(self.requests.listing(folder))

    def _remove_staged(self) -> None:
        """Remove what writers never finished: a directory shows it."""
        if self.requests.directory is None:
            return
        for path, nbytes, modified, _ in itertools.chain(
            self._listing(self._layout.folder), self._listing(ERASED)
        ):
            if STAGED in path and self._now - modified > self.settings.staged_s:
                self._remove(path, "staged file", nbytes, "its writer never finished it")

    def _look_at_pins(self) -> None:
        """Learn what is pinned. What is over, or was erased of a pin, goes as soon as that is read,
        before its owner changes it."""

        def clean(listed: Listed) -> tuple[Listed, Pin | None, Pin | None]:
            found = read_pin(self.requests, self._layout, listed)
            if found is None:
                return listed, None, None
            pin = alive(*found, self._erased, self._layout.namespace)
            if pin is not None and pin.until_s is not None and pin.until_s <= self._now:
                pin = None
            if self._delete:
                write_changed(self.requests, listed, found, pin)
            return listed, found[0], pin

        for listed, found, pin in self.requests.each(clean, self._listing(self._layout.pins)):
            if found is None:
                self._report.num_unreadable += 1
            elif pin is not None:
                self._pinned.update(pin.keys)
            else:
                is_over = found.until_s is not None and found.until_s <= self._now
                reason = "it is over" if is_over else "its pages were erased"
                removal = Removal(listed.path, "pin", listed.size, reason)
                self._report.removals.append(removal)
                self._note_done([removal] if self._delete else [])

    def _keeps(self, key: bytes, nbytes: int) -> bool:
        """Return whether a page stays for a pin: the oldest do, up to what pins may keep."""
        if key not in self._pinned:
            return False
        self._left_bytes -= nbytes
        return self._left_bytes >= 0

    def _look_at_pages(self) -> int:
        """Remove what is erased or over age; returns the bytes that are left."""
        report, ttl_s = self._report, self.settings.ttl_s
        self._left_bytes = pin_share(self.settings.capacity_bytes)
        num_left = 0
        for path, nbytes, modified, _ in self._listing(self._layout.pages):
            age_s = self._now - modified
            name = parse_page(path)
            if name is None:
                report.num_foreign += 1
                continue
            report.num_pages += 1
            report.page_bytes += nbytes
            if self._erased.kills(self._layout.namespace, name.tenant, name.key, name.stamp):
                self._remove(path, "page", nbytes, "it was erased")
                continue
            is_kept = self._keeps(name.key, nbytes)
            if ttl_s is not None and age_s > ttl_s and not is_kept:
                self._remove(path, "page", nbytes, "it is too old")
            else:
                num_left += nbytes
        return num_left

    def _hold_the_cap(self, num_bytes: int) -> None:
        """Remove the oldest pages beyond the cap: a listing begins with them."""
        capacity = self.settings.capacity_bytes
        if capacity is None or num_bytes <= capacity:
            return
        self._left_bytes = pin_share(capacity)
        gone = {removal.path for removal in self._report.removals}
        for path, nbytes, _, _ in self._listing(self._layout.pages):
            name = parse_page(path)
            if name is None or path in gone or self._keeps(name.key, nbytes):
                continue
            self._remove(path, "page", nbytes, "the namespace is beyond its cap")
            num_bytes -= nbytes
            if num_bytes <= capacity:
                return

    def _remove_records(self, records: list[Record]) -> None:
        """Remove old records, and merge many into one, but never the last: its number is where the
        next goes on from. Whoever dies between leaves some twice, which harms nothing."""
        last = max((record.number for record in records), default=0)
        lasts = {record.path for record in records if record.number == last}
        times: dict[str, float] = {}  # of the youngest in each object
        for record in records:
            if record.path not in lasts and (record.what is None or not record.what.is_empty):
                times[record.path] = max(times.get(record.path, 0.0), record.modified)
        # No page may outlive the record of its erasure, in a namespace that is not used either.
        oldest_s = self._now - max(self.settings.record_s, self._unused_s)
        for path in [path for path, at in times.items() if at < oldest_s]:
            del times[path]
            self._remove(path, "erasure", 0, "every server has applied it")
        settled_s = self._now - self.settings.merged_s
        settled = [record for record in records if times.get(record.path, self._now) < settled_s]
        for path, data, replaced in mergeable(settled, oldest_s):
            if self._delete:
                self.requests.put(path, data)
            for each in replaced:
                self._remove(each, "erasure", 0, "it is merged with others")

    def _remove_old_namespaces(self) -> None:
        """Remove what no server has written to, or collected, for long."""
        for folder in self.requests.folders(ROOT):
            namespace = namespace_of(folder)
            if namespace in (None, self._layout.namespace):
                continue
            collected = self.requests.modified(Layout(namespace or b"").collected)
            if collected is not None and self._now - collected <= self._unused_s:
                continue
            found = [(each.path, each.size, each.modified) for each in self._listing(folder)]
            if found and self._now - max(modified for _, _, modified in found) > self._unused_s:
                for path, nbytes, _ in found:
                    self._remove(path, "old namespace", nbytes, "no server uses its namespace")

    def _remove(self, path: str, kind: str, nbytes: int, reason: str) -> None:
        if len(self._report.removals) >= self._budget:
            raise _Enough
        removal = Removal(path, kind, nbytes, reason)
        self._report.removals.append(removal)
        self._batch.append(removal)
        if len(self._batch) >= _DELETED_AT_ONCE:
            self._remove_batch()

    def _remove_batch(self) -> None:
        batch, self._batch = self._batch, []
        if self._delete and batch:
            self.requests.delete([removal.path for removal in batch])
            self._note_done(batch)

    def _note_done(self, removals: list[Removal]) -> None:
        for removal in removals:
            removal.is_done = True
            self._report.num_removed += 1
            self._report.removed_bytes += removal.nbytes
