"""``Demoter``: copies what NVMe holds and the bucket lacks, in the background.

One thread. It reads through NVMe into memory of its own, so no host page waits for the
network; each batch stays there until the bucket says that it is durable. It begins a batch
only while no load is under way and the bucket serves. What a caller waits for is copied on the
caller's own thread, whatever else goes on.
"""

from __future__ import annotations

import logging
import math
import threading
from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.base import NO_TENANT, Health, Reason, Run
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import padded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.bucket import BucketEngine
    from sglang_tiered.storage.region.engine import RegionEngine
    from sglang_tiered.storage.region.view import StoredPage


MiB = 1 << 20
STEP_PAGES = 1024
CHAIN_PAGES = 64
"""Pages of one tenant that follow each other in the log are taken for a chain, cut at this."""
LOOK_S = 0.25  # how often an idle demoter looks whether the bucket serves again
JOIN_S = 10.0
_GOOD = (Reason.OK, Reason.DUPLICATE)
_FINAL = (Reason.NO_SPACE, Reason.OVER_SHARE)  # trying again would not help

logger = logging.getLogger(__name__)

RETRY_GROWTH = 4


@dataclass(frozen=True, slots=True)
class StackSettings:
    """Bounds of the background work.

    ``staging_bytes`` lie between the tiers while they are demoted, in batches of ``batch_bytes``;
    ``promotion_bytes`` while they are promoted. A key of the demotion queue takes about 100 bytes.
    A failed batch is tried again after ``retry_s``, four times as long each time, ``max_tries``
    times in all.
    """

    staging_bytes: int = 128 * MiB
    batch_bytes: int = 8 * MiB
    promotion_bytes: int = 64 * MiB
    max_queued_keys: int = 262_144
    max_tries: int = 5
    retry_s: float = 5.0


@dataclass(slots=True, eq=False)
class StoredChain:
    """Consecutive pages of one tenant."""

    keys: tuple[bytes, ...]
    tenant: bytes
    returned: bool = False
    num_tries: int = 0
    due: float = 0.0


class DemotionQueue:
    """Waiting chains, each once, under its first key; at most ``max_queued_keys`` keys. What does
    not fit is refused, as a walk finds it later. Thread-safe by one lock, which is a leaf."""

    def __init__(self, settings: StackSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._returned: OrderedDict[bytes, StoredChain] = OrderedDict()
        self._fresh: OrderedDict[bytes, StoredChain] = OrderedDict()
        self._failed: list[StoredChain] = []  # by when they are due
        self.num_keys = 0
        self.overflowed = False  # something was refused since a walk began

    @property
    def num_free(self) -> int:
        return max(0, self._settings.max_queued_keys - self.num_keys)

    def add(self, keys: Sequence[bytes], tenant: bytes, *, returned: bool = False) -> bool:
        """Queue a chain; false when there is no room."""
        first = keys[0]
        with self._lock:
            known = self._returned.get(first) or self._fresh.get(first)
            grown = len(keys) - (0 if known is None else len(known.keys))
            if known is not None and grown <= 0:
                return True
            if not self._fits(grown):
                return False
            if known is not None:
                returned = returned or known.returned
                del (self._returned if known.returned else self._fresh)[first]
            chain = StoredChain(tuple(keys), tenant, returned)
            (self._returned if returned else self._fresh)[first] = chain
            self.num_keys += grown
            return True

    def _fits(self, num_keys: int) -> bool:
        fits = self.num_keys + num_keys <= self._settings.max_queued_keys
        self.overflowed = self.overflowed or not fits
        return fits

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a load of these pages: chains that begin with one of them are worth more."""
        with self._lock:
            if not self._fresh:
                return
            for key in keys:
                chain = self._fresh.pop(key, None)
                if chain is not None:
                    chain.returned = True
                    self._returned[key] = chain

    def take(self) -> StoredChain | None:
        """Return the next chain, which is the caller's from now on."""
        with self._lock:
            if self._failed and self._failed[0].due <= self._clock():
                chain = self._failed.pop(0)
            elif waiting := self._returned or self._fresh:
                chain = waiting.popitem(last=False)[1]
            else:
                return None
            self.num_keys -= len(chain.keys)
            return chain

    def interrupted(self, keys: Sequence[bytes], chain: StoredChain) -> None:
        """Have the rest of a chain that was taken be the next again, in the room that it had."""
        with self._lock:
            self._failed.insert(0, replace(chain, keys=tuple(keys), due=0.0))
            self.num_keys += len(keys)

    def failed(self, keys: Sequence[bytes], chain: StoredChain, *, is_try: bool = True) -> bool:
        """Queue pages of a chain again after a pause that failed, or without ``is_try`` could not
        be tried. False when that was the last time, or where there is no room."""
        with self._lock:
            num_tries = chain.num_tries + is_try
            if num_tries >= self._settings.max_tries or not self._fits(len(keys)):
                return False
            due = self._clock() + self._settings.retry_s * RETRY_GROWTH**chain.num_tries
            again = replace(chain, keys=tuple(keys), num_tries=num_tries, due=due)
            insort(self._failed, again, key=lambda each: each.due)  # few: one a failed batch
            self.num_keys += len(keys)
            return True

    def clear(self) -> None:
        with self._lock:
            self._returned.clear()
            self._fresh.clear()
            self._failed.clear()
            self.num_keys = 0


class _DemotionBatch(NamedTuple):
    """Consecutive pages of a chain that are copied together."""

    chain: StoredChain
    pages: list[StoredPage]
    num_bytes: int  # of staging memory


class Demoter:
    """Any thread may call; see the module docstring for its own.

    ``gate`` and ``generation``: a store is submitted under the gate and only if nothing was erased
    since its pages were read. ``is_idle``: whether no load of a caller is under way; it must not
    block.
    """

    def __init__(
        self,
        nvme: RegionEngine,
        bucket: BucketEngine,
        settings: StackSettings,
        *,
        gate: threading.Lock,
        generation: Callable[[], int],
        is_idle: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._nvme = nvme
        self._bucket = bucket
        self._settings = settings
        self._gate = gate
        self._generation = generation
        self._is_idle = is_idle
        self.queue = DemotionQueue(settings, clock)
        # What earlier processes stored was perhaps never copied.
        self._walk: Iterator[bool] | None = self._walked()
        self._wake = threading.Condition()
        self._staged_bytes = 0  # guarded by ``_wake``, like all counts
        self._num_in_flight = 0
        self._clock = clock
        self._closed = False
        self._suspended = False
        self._takes_stores = True
        self.num_demoted = 0
        self.bytes_demoted = 0
        self.num_dropped = 0
        self.num_gone = 0
        self._thread = threading.Thread(target=self._run, name="tier-demoter", daemon=True)
        self._thread.start()

    # ---- Any thread, memory only ----

    @property
    def backlog(self) -> int:
        """Return how many pages wait or are on their way."""
        return self.queue.num_keys + self._num_in_flight

    def stored(self, keys: Sequence[bytes], tenant: bytes) -> None:
        """Queue these consecutive pages, which NVMe holds now. May run under its lock."""
        if not self._suspended and keys:
            self.queue.add(keys, tenant)
            self.wake()

    def wake(self) -> None:
        """Wake the demoter: something changed that it may wait for."""
        with self._wake:
            self._wake.notify_all()

    def suspend(self) -> None:
        """Copy nothing from now on unless asked to: no request could name the pages."""
        self._suspended = True
        self.queue.clear()

    def close(self) -> None:
        """Begin nothing more. What is under way ends with its engines."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self.queue.clear()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    # ---- A caller's thread ----

    def copy_now(self, keys: Sequence[bytes], deadline: float) -> None:
        """Begin to copy these pages of one chain, as far as that can be until then. Blocks."""
        chain = StoredChain(tuple(keys), NO_TENANT)
        for batch in self._batches(chain)[0]:
            if not self._serves() or not self._has_room(batch, deadline):
                return
            self._copy(batch, max(0.0, deadline - self._clock()))

    # ---- The thread ----

    def _run(self) -> None:
        while not self._closed:
            try:
                moved = self._step()
            except Exception:
                # The tier serves without copies: log it and go on slowly.
                logger.exception("internal error while copying to the bucket; it is tried again")
                moved = False
            with self._wake:
                if not moved and not self._closed:
                    self._wake.wait(LOOK_S)

    def _step(self) -> bool:
        """Copy a chain, or look for some; false when there is nothing to do now."""
        if not self._serves():
            return False
        took_stores, self._takes_stores = self._takes_stores, self._bucket.takes_stores
        if self._takes_stores and not took_stores:
            self.queue.overflowed = True  # for what failed too often meanwhile
        # Before the bucket knows what it holds, all would be copied again.
        if not (self._takes_stores and self._bucket.has_listed and self._is_idle()):
            return False
        chain = self.queue.take()
        if chain is not None:
            try:
                self._demote(chain)
            except Exception:  # loses no chain; what was begun of it the bucket knows
                self._again(chain.keys, chain)
                raise
            return True
        if self._suspended:
            return False
        if self._walk is None and self.queue.overflowed:  # one under way may be past it
            self.queue.overflowed = False
            self._walk = self._walked()
        try:
            has_moved = None if self._walk is None else next(self._walk, None)
        except Exception:  # which ends it: another one finds the rest
            self.queue.overflowed = True
            raise
        if has_moved is None:
            self._walk = None
        return bool(has_moved)

    def _walked(self) -> Iterator[bool]:
        """Walk what NVMe holds, oldest first, and queue what the bucket lacks: after a start, and
        whenever the queue was too full to take what was stored. Yields whether it went on."""
        sequence = -1
        while (region := self._nvme.view.pages_behind(sequence)) is not None:
            sequence, pages = region
            while pages:
                num_pages = min(STEP_PAGES, self.queue.num_free)
                step, pages = pages[:num_pages], pages[num_pages:]
                self._queue_lacking(step)
                yield num_pages > 0

    def _queue_lacking(self, pages: Sequence[StoredPage]) -> None:
        held = self._bucket.contains([page.key for page in pages])
        lacking = [page for page, is_held in zip(pages, held, strict=True) if not is_held]
        for (tenant, used), group in groupby(lacking, lambda page: (page.tenant, page.is_used)):
            keys = [page.key for page in group]
            for start in range(0, len(keys), CHAIN_PAGES):
                self.queue.add(keys[start : start + CHAIN_PAGES], tenant, returned=used)

    def _serves(self) -> bool:
        return self._bucket.health is Health.RUNNING

    def _demote(self, chain: StoredChain) -> None:
        batches, num_gone = self._batches(chain)
        self._count(num_gone=num_gone)
        for number, batch in enumerate(batches):
            may_go = self._has_room(batch) and self._is_idle() and self._serves()
            if not (may_go and self._bucket.takes_stores):
                left = [page.key for rest in batches[number:] for page in rest.pages]
                if not self._closed:
                    self.queue.interrupted(left, chain)
                return
            self._copy(batch)

    def _batches(self, chain: StoredChain) -> tuple[list[_DemotionBatch], int]:
        """Return what NVMe still holds of a chain and the bucket lacks, and how many pages of that
        are gone."""
        found = self._nvme.view.find(chain.keys)
        held = self._bucket.contains(chain.keys)
        batches: list[_DemotionBatch] = []
        num_gone = 0
        for page, is_held in zip(found, held, strict=True):
            if is_held:
                continue
            if page is None:
                num_gone += 1
                continue
            num_bytes = padded(page.length)
            last = batches[-1] if batches else None
            if (
                last is None
                or last.num_bytes + num_bytes > self._settings.batch_bytes
                or last.pages[0].tenant != page.tenant
            ):
                batches.append(_DemotionBatch(chain, [page], num_bytes))
            else:
                last.pages.append(page)
                batches[-1] = last._replace(num_bytes=last.num_bytes + num_bytes)
        return batches, num_gone

    def _has_room(self, batch: _DemotionBatch, deadline: float = math.inf) -> bool:
        """Wait until the batch fits into staging memory; false when closed meanwhile, or late."""
        limit = max(self._settings.staging_bytes, batch.num_bytes)

        def fits() -> bool:
            return self._closed or self._staged_bytes + batch.num_bytes <= limit

        while self._clock() < deadline:
            with self._wake:
                if self._wake.wait_for(fits, LOOK_S):
                    return not self._closed
            if not self._serves():  # not under our lock: batches land under the bucket's
                return False
        return False

    def _copy(self, batch: _DemotionBatch, timeout_s: float | None = None) -> None:
        """Read a batch and hand it to the bucket. Where something was erased between, it is read
        again later."""
        generation = self._generation()
        with self._wake:
            self._staged_bytes += batch.num_bytes
            self._num_in_flight += len(batch.pages)
        job: Job | None = None
        try:
            load = self._read(batch)
            if not load.wait(timeout_s):  # NVMe ends it, and has its memory until then
                load.call_at_end(lambda _: self._completed(batch))
                return
            run = _read_of(load, batch)
            num_read = 0 if run is None else run.num_pages
            if run is not None:
                with self._gate:
                    if self._generation() == generation:
                        job = self._bucket.submit_store(run)
                if job is None and not (self._closed or self._suspended):
                    self.queue.interrupted([page.key for page in batch.pages], batch.chain)
            if run is None or job is not None:
                self._count(num_gone=len(batch.pages) - num_read)
        except BaseException:
            self._completed(batch)
            raise
        if job is None:
            self._completed(batch)
        else:
            job.call_at_end(lambda finished: self._stored(finished, batch))

    def _read(self, batch: _DemotionBatch) -> Job:
        """Begin to read pages into staging memory, each into whole blocks."""
        memory = aligned_buffer(batch.num_bytes)
        buffers = []
        start = 0
        for page in batch.pages:
            buffers.append(memory[start : start + padded(page.length)])
            start += padded(page.length)
        run = Run(tuple(p.key for p in batch.pages), tuple((buffer,) for buffer in buffers))
        lengths = [page.length for page in batch.pages]
        # Whole blocks, which go to memory without a copy; and reclaim would keep all that went
        # down, if that counted as use.
        return self._nvme.submit_load(run, stored_lengths=lengths, for_request=False)

    def _stored(self, job: Job, batch: _DemotionBatch) -> None:
        """Note a finished store. May run under the bucket's lock; must not block."""
        outcomes = list(zip(job.run.keys, job.reasons, job.run.pages, strict=True))
        stored = [page[0].nbytes for _, reason, page in outcomes if reason is Reason.OK]
        for is_try in (True, False):  # what the bucket did not take was not tried
            failed = [
                key
                for key, reason, _ in outcomes
                if reason not in (*_GOOD, *_FINAL) and is_try is (reason is not Reason.REJECTED)
            ]
            if failed and not self._closed:
                self._again(failed, batch.chain, is_try=is_try)
        self._count(
            num_demoted=len(stored),
            bytes_demoted=sum(stored),
            num_dropped=sum(reason in _FINAL for _, reason, _ in outcomes),
        )
        self._completed(batch)

    def _again(self, keys: Sequence[bytes], chain: StoredChain, *, is_try: bool = True) -> None:
        """Try these pages of a chain again, or count those as dropped that failed too often."""
        if not self.queue.failed(keys, chain, is_try=is_try):
            self._count(num_dropped=len(keys))

    def _count(self, **counts: int) -> None:
        with self._wake:
            for name, number in counts.items():
                setattr(self, name, getattr(self, name) + number)

    def _completed(self, batch: _DemotionBatch) -> None:
        with self._wake:
            self._staged_bytes -= batch.num_bytes
            self._num_in_flight -= len(batch.pages)
            self._wake.notify_all()

    def in_flight_totals(self) -> tuple[int, int]:
        """Return the bytes and pages in flight, for checks of the books."""
        with self._wake:
            return self._staged_bytes, self._num_in_flight


def _read_of(load: Job, batch: _DemotionBatch) -> Run | None:
    """Return the pages that were read, in the bytes that are stored; None if no page verified."""
    good = [i for i, is_ok in enumerate(load.ok) if is_ok]
    if not good:
        return None
    keys = tuple(batch.pages[i].key for i in good)
    pages = tuple((load.run.pages[i][0][: batch.pages[i].length],) for i in good)
    return Run(keys, pages, batch.pages[0].tenant)
