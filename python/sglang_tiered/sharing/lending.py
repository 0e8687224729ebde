"""Lending: one process has a store open, and gives the other ranks of its server pages of it.

It is the page protocol over a Unix socket in the shard (``LENDING``). Borrowers keep nothing, ask
for all that they want, and take pages only of a lender that takes the store for the same
(``claim``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.errors import StoreError, TransferError
from sglang_tiered.sharing.page_source import PageSource
from sglang_tiered.sharing.pages.client import PageClient
from sglang_tiered.sharing.pages.link import PageOutcome
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.sharing.settings import PageSettings
from sglang_tiered.storage.base import (
    Health,
    Job,
    JobKind,
    Reason,
    Run,
    TierEngine,
    TierStats,
)
from sglang_tiered.storage.jobs import JobBook
from sglang_tiered.storage.promises import ended
from sglang_tiered.storage.region.device import copy_page
from sglang_tiered.storage.region.format import LENDING_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from sglang_tiered.sharing.pages.link import PageFetch
    from sglang_tiered.storage.base import Erasure, Page
    from sglang_tiered.storage.jobs import LoadPart


SETTINGS = PageSettings(is_local=True, max_reads=8)
"""Of both sides."""

RETRY_S = 1.0
"""A lender that could not be reached is tried again after this long."""


def _namespace_of(claim: bytes | None) -> bytes:
    """Return the namespace in which pages are asked for; of no claim one that nobody else has."""
    return secrets.token_bytes(32) if claim is None else hashlib.sha256(claim).digest()


def _open_shard(shard: Path) -> tuple[int, str]:
    """Return a descriptor of a shard, and by it the path of its socket, however deep that lies.
    Raises ``OSError``."""
    descriptor = os.open(shard, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return descriptor, f"/proc/self/fd/{descriptor}/{LENDING_NAME}"


@dataclass(eq=False, slots=True)
class _OwnLoad:
    """A load of the lending process itself, and those that its pages are copied for."""

    job: Job
    moment: object  # of what pages are, and of erasures
    pages: dict[bytes, Page]
    joined: list[Job] = field(default_factory=list)


class PageLender:
    """Lends pages from construction to ``close``; the caller has the shard locked. ``submit``
    begins a load, and ``generation`` changes with every erasure. Raises ``StoreError`` where
    nothing can listen in the shard. Any thread; copies are made on that of the page server."""

    def __init__(
        self,
        shard: Path,
        submit: Callable[[Run], Job],
        generation: Callable[[], int] = lambda: 0,
    ) -> None:
        self._namespace = _namespace_of(None)
        self._generation = generation
        self._lock = threading.Lock()
        self._own: dict[bytes, _OwnLoad] = {}  # by the keys of their pages
        self._is_closed = False
        self._source = PageSource(
            lambda run: self._join(run) or submit(run),
            namespace=lambda: self._namespace,
            max_free_bytes=SETTINGS.max_serving_bytes // 2,
            generation=generation,
        )
        self._descriptor, self._path = _open_shard(shard)
        try:
            self._server = PageServer(
                self._source,
                namespace=self._namespace,
                endpoint=f"ipc://{self._path}",
                settings=SETTINGS,
            )
            os.chmod(self._path, 0o600)
        except (TransferError, OSError) as error:
            os.close(self._descriptor)
            raise StoreError(
                f"{shard} takes no socket ({error}), by which ranks share its pages; pass another "
                "--tier-dir"
            ) from error

    def set_claim(self, claim: bytes | None) -> None:
        """Take the pages for this from now on. They go only to a borrower with the same claim, and
        to no borrower while it is None. The owner sets None before it changes what the engine
        finds, and the new claim afterwards."""
        self._namespace = _namespace_of(claim)
        self._server.set_namespace(self._namespace)

    def load(self, run: Run, submit: Callable[[Run], Job]) -> Job:
        """Begin a load of this process, whose pages go to borrowers too that ask for them before
        they are there. It ends once they have them, and has no other outcome."""
        pages = dict(zip(run.keys, run.pages, strict=True))
        own = _OwnLoad(Job(JobKind.LOAD, run), self._moment, pages)
        with self._lock:
            if not self._is_closed:
                self._own.update(dict.fromkeys(pages, own))
        try:
            submit(run).call_at_end(partial(self._ended, own))
        except BaseException:
            self._ended(own, own.job)  # or who joined it would wait for ever
            raise
        return own.job

    @property
    def _moment(self) -> object:
        return self._namespace, self._generation()

    def _join(self, run: Run) -> Job | None:
        """Return a load that waits for an own one under way, if one brings all of these pages."""
        moment, sizes = self._moment, [_size(page) for page in run.pages]
        with self._lock:
            own = self._own.get(run.keys[0])
            if own is None or own.moment != moment:
                return None
            if [_size(own.pages.get(key, ())) for key in run.keys] != sizes:
                return None
            own.joined.append(Job(JobKind.LOAD, run))
            return own.joined[-1]

    def _ended(self, own: _OwnLoad, job: Job) -> None:
        """May run under a store's lock."""
        own.job.reasons = job.reasons
        with self._lock:
            for key in own.pages:
                if self._own.get(key) is own:
                    del self._own[key]
            if own.joined and not self._is_closed:
                self._server.loop.call(self._copy, own)
                return
        _finish(own)

    def _copy(self, own: _OwnLoad) -> None:
        became = dict(zip(own.pages, own.job.reasons, strict=True))
        try:
            for job in own.joined:
                reasons = [became[key] for key in job.run.keys]
                for key, (into,) in zip(job.run.keys, job.run.pages, strict=True):
                    if became[key] is Reason.OK:
                        copy_page(own.pages[key], into)
                job.reasons = reasons
        finally:
            _finish(own)

    def close(self) -> None:
        """Give nothing from now on. What is copied by then is copied. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._own.clear()
        self._server.stop()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._descriptor)


def _finish(own: _OwnLoad) -> None:
    own.job.finish()  # the pages may change from now on
    for job in own.joined:
        job.finish()


def _size(page: Page) -> int:
    return sum(part.nbytes for part in page)


class BorrowedEngine(TierEngine):
    """Loads pages from the process that has a shard open, and keeps none. Lookups answer that every
    key is held, and stores that it is held already: only the lender knows, and the caller takes the
    minimum of both. Nothing is found before ``open``, nor while ``claim`` is None: what the pages
    are taken to be. A page that the lender lost meanwhile is a miss."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.claim: bytes | None = None
        self._clock = clock
        self._lock = threading.Lock()  # of all below
        self._client: PageClient | None = None
        self._closed = False
        self._generation = 0  # of erasures
        self._failed_at: float | None = None
        self._jobs = JobBook()

    def open(self, shard: Path) -> None:
        """Borrow from the process that has this shard open, now or later. Once. Raises
        ``OSError``."""
        self._descriptor, path = _open_shard(shard)
        self._address, self._client = f"ipc://{path}", PageClient(SETTINGS)

    @property
    def serves(self) -> bool:
        """Return whether a load could bring anything."""
        return self.health is Health.RUNNING and None not in (self.claim, self._client)

    @property
    def health(self) -> Health:
        if self._closed:
            return Health.FAILED
        failed_at = self._failed_at
        is_sick = failed_at is not None and self._clock() - failed_at < RETRY_S
        return Health.MISS_ONLY if is_sick else Health.RUNNING

    # ---- Lookups ----

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.serves] * len(keys)

    # ---- Jobs ----

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        with self._lock:
            job = self._jobs.open(JobKind.LOAD, run)
            claim, client, generation = self.claim, self._client, self._generation
            if self._closed or claim is None or client is None:
                if not self._closed:
                    job.reasons = [Reason.MISS] * run.num_pages
                self._jobs.finish(job)
                return job
        client.load(
            job,
            _namespace_of(claim),
            lambda keys, failed: [None if failed else self._address] * len(keys),
            deadline_s=deadline_s,
            learn=self._learn,
            over=partial(self._over, generation),
        )
        return job

    def _learn(self, _: LoadPart[str], fetch: PageFetch) -> None:
        """The client's thread."""
        self._failed_at = self._clock() if PageOutcome.LOST in fetch.outcomes else None

    def _over(self, generation: int, job: Job) -> None:
        with self._lock:
            if generation != self._generation:  # some of it may be erased
                job.reasons = [Reason.CANCELLED] * job.run.num_pages
            self._jobs.note_end(job)

    # ---- What concerns the store is its owner's ----

    def set_namespace(self, namespace: bytes, *, keep: bool = True) -> None:
        """Do nothing: ``claim`` says what pages are taken to be."""

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        """Fail what is on its way. The borrower keeps nothing that could come back."""
        with self._lock:
            self._generation += 1
        return ended(not self._closed)

    # ---- Books ----

    def stats(self) -> TierStats:
        """Count no pages: the lender counts what it reads for other ranks too."""
        health = self.health
        reason = "" if health is Health.RUNNING else "the rank with the pages is gone"
        with self._lock:
            return TierStats(health, reason, num_inflight_jobs=self._jobs.num_inflight)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._client is not None:
            self._client.close()
            os.close(self._descriptor)

    def check_integrity(self) -> None:
        assert not self._jobs.num_inflight, f"{self._jobs.num_inflight} loads under way"
