"""Lending: one process has a store open, and gives the other ranks of its server pages of it.

It is the page protocol over a Unix socket in the shard (``LENDING``). Borrowers ask for all that
they want, and take pages only of a lender that takes the store for the same (``claim``). Ranks ask
for the same pages at about the same time: one read serves all who ask before it is sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.errors import StoreError, TransferError
from sglang_tiered.sharing.page_source import BufferPool
from sglang_tiered.sharing.pages.client import PageClient
from sglang_tiered.sharing.pages.landing import Outcome
from sglang_tiered.sharing.pages.messages import page_checksum
from sglang_tiered.sharing.pages.server import PageServer, Place
from sglang_tiered.sharing.pages.settings import PageSettings
from sglang_tiered.storage.base import Reason, Run
from sglang_tiered.storage.region.files import LENDING_NAME
from sglang_tiered.storage.region.format import padded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sglang_tiered.sharing.pages.landing import Fetch
    from sglang_tiered.storage.base import Job

__all__ = ["BorrowingClient", "PageLender"]

_SETTINGS = PageSettings(is_local=True, max_reads=8)
_REASONS = {
    Outcome.OK: Reason.OK,
    Outcome.DAMAGED: Reason.CORRUPT,
    Outcome.LATE: Reason.IO_ERROR,
    Outcome.CANCELLED: Reason.MISS,
}


def _namespace_of(claim: bytes) -> bytes:
    return hashlib.sha256(claim).digest()


class _Read:
    """Pages that are being read, for all who ask for them until they were sent."""

    def __init__(self, source: _LenderSource, name: object, data: memoryview) -> None:
        self._source = source
        self._name = name
        self._lock = threading.Lock()
        self._places: list[Place | None] | None = None
        self.namespace = b""
        self.data = data
        self.job: Job | None = None
        self.waiting: list[Callable[[_Read], None]] | None = []
        self.num_readers = 0

    @property
    def places(self) -> Sequence[Place | None]:
        """Where the pages are, with checksums for who asked; made once, by who sends first."""
        with self._lock:
            if self._places is None:
                assert self.job is not None
                at, self._places = 0, []
                run, reasons = self.job.run, self.job.reasons
                for key, (page,), reason in zip(run.keys, run.pages, reasons, strict=True):
                    is_ok = reason is Reason.OK
                    checksum = page_checksum(self.namespace, key, [page]) if is_ok else 0
                    self._places.append(Place(at, page.nbytes, checksum) if is_ok else None)
                    at += padded(page.nbytes)
            return self._places

    def release(self) -> None:
        self._source.released(self._name, self)


class _LenderSource:
    """A ``PageReader`` over ``submit``. ``generation`` changes with every erasure: who asks
    after one is given nothing that was read before."""

    is_pressed = False

    def __init__(self, submit: Callable[[Run], Job], generation: Callable[[], int]) -> None:
        self._submit = submit
        self._generation = generation
        self._memory = BufferPool(_SETTINGS.max_serving_bytes // 2)
        self._lock = threading.Lock()
        self._reads: dict[object, _Read] = {}
        self.namespace = secrets.token_bytes(32)

    def read(
        self, keys: Sequence[bytes], lengths: Sequence[int], done: Callable[[_Read | None], None]
    ) -> None:
        """See ``PageReader.read``."""
        name = (self.namespace, self._generation(), tuple(keys), tuple(lengths))
        with self._lock:
            read = self._reads.get(name)
            is_first = read is None
            if read is None:
                data = self._memory.borrow_buffer(sum(map(padded, lengths)))
                read = self._reads[name] = _Read(self, name, data)
                read.namespace = self.namespace
            read.num_readers += 1
            is_over = read.waiting is None
            if read.waiting is not None:
                read.waiting.append(done)
        if is_over:
            done(read)
        if not is_first:
            return
        at, pages = 0, []
        for length in lengths:
            pages.append((read.data[at : at + length],))
            at += padded(length)
        self._submit(Run(tuple(keys), tuple(pages))).call_at_end(partial(self.ended, read))

    def ended(self, read: _Read, job: Job) -> None:
        """Hand pages to all who wait. May run under a store's lock."""
        with self._lock:
            read.job = job
            waiting, read.waiting = read.waiting or [], None
        for done in waiting:
            done(read)

    def released(self, name: object, read: _Read) -> None:
        with self._lock:
            read.num_readers -= 1
            if read.num_readers:
                return
            self._reads.pop(name, None)
        self._memory.return_buffer(read.data)


class PageLender:
    """Lends pages from construction to ``close``; the caller has the shard locked. ``submit``
    begins a load. Raises ``StoreError`` where nothing can listen in the shard."""

    def __init__(
        self,
        shard: Path,
        submit: Callable[[Run], Job],
        generation: Callable[[], int] = lambda: 0,
    ) -> None:
        self._claim: bytes | None = None
        self._source = _LenderSource(submit, generation)
        self._fd = os.open(shard, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._path = f"/proc/self/fd/{self._fd}/{LENDING_NAME}"
        try:
            self._server = PageServer(
                self._source,
                namespace=self._source.namespace,
                endpoint=f"ipc://{self._path}",
                settings=_SETTINGS,
            )
            os.chmod(self._path, 0o600)
        except (TransferError, OSError) as error:
            os.close(self._fd)
            raise StoreError(
                f"{shard} takes no socket ({error}), by which ranks share its pages; pass another "
                "--tier-dir"
            ) from error
        self._is_closed = False

    @property
    def claim(self) -> bytes | None:
        """Return what the pages are taken to be. They go only to a borrower with the same claim,
        and to no borrower while it is None. The owner sets None before it changes what the engine
        finds, and the new claim afterwards."""
        return self._claim

    @claim.setter
    def claim(self, claim: bytes | None) -> None:
        self._claim = claim
        namespace = secrets.token_bytes(32) if claim is None else _namespace_of(claim)
        self._source.namespace = namespace
        self._server.set_namespace(namespace)

    def close(self) -> None:
        """Give nothing from now on. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._server.stop()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._fd)


class BorrowingClient:
    """A ``Lender`` for a ``BorrowedEngine``: the process that has ``shard`` open."""

    def __init__(self, shard: Path) -> None:
        self._fd = os.open(shard, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._address = f"ipc:///proc/self/fd/{self._fd}/{LENDING_NAME}"
        self._client = PageClient(_SETTINGS)
        self._is_closed = False

    def fetch(
        self,
        claim: bytes,
        run: Run,
        deadline_s: float | None,
        done: Callable[[list[Reason] | None], None],
    ) -> None:
        """See ``Lender.fetch``."""

        def ended(fetch: Fetch) -> None:
            is_lost = Outcome.LOST in fetch.outcomes and not fetch.num_heard
            reasons = [_REASONS.get(each, Reason.MISS) for each in fetch.outcomes]
            done(None if is_lost else reasons)

        self._client.fetch(
            self._address,
            _namespace_of(claim),
            run.keys,
            run.pages,
            deadline_s=deadline_s,
            done=ended,
        )

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._client.close()
            os.close(self._fd)
