"""Requests to the bucket: retries, deadlines, counting. ``connect`` opens what they go to.

A buffer given to ``put`` must never change afterwards: a request that timed out may still read it,
and a store in memory keeps it.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_tiered.storage.object.budgets import RequestCost, RetryBudget
from sglang_tiered.storage.object.connect import FIRST_PAUSE_S, find_store, obstore
from sglang_tiered.storage.object.directory import Directory
from sglang_tiered.storage.object.failures import Failure, RequestError, explain
from sglang_tiered.storage.object.format import MAX_MANIFEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sglang_tiered.storage.object.connect import FoundStore
    from sglang_tiered.storage.object.settings import ObjectSettings

__all__ = ["Listed", "ObjectClient", "open_client"]

MULTIPART_BYTES = 17 << 20
"""Larger objects go up in parts of this size: few requests, and each ends within its timeout. A
payload of 16 MiB and its manifest are one."""

_MAX_TRIES = 3
_REMOTE_GAP_BYTES = 1 << 20  # until it is measured
_LOCAL_GAP_BYTES = 64 << 10
_REMOTE_SPAN_BYTES = 8 << 20
_LOCAL_SPAN_BYTES = 2 << 20
_LIST_CHUNK = 1000
_MAX_DELETES = 1000


class Listed(NamedTuple):
    """One object of a listing."""

    path: str
    size: int
    modified: float  # seconds since 1970, as the store says


class ObjectClient:
    """Blocking requests under one prefix; thread-safe. Every method raises ``RequestError``.
    ``on_outcome`` is called after the retries of every request that reads: with None when it was
    answered, else with the error."""

    def __init__(
        self,
        found: FoundStore,
        *,
        place: str,
        timeout_s: float = 10.0,
        on_outcome: Callable[[RequestError | None], None] | None = None,
    ) -> None:
        self._directory = None if found.directory is None else Directory(found.directory)
        self._timeout_s = timeout_s
        self._is_remote = is_remote = found.is_remote
        self._place = place
        self.on_outcome = on_outcome
        # Requests are retried here, by budget and deadline; parts of an upload by the library.
        self._make_store = found.make_store
        self._opened: Any = None
        with contextlib.suppress(OSError):  # a directory that is not there may come yet
            self._opened = found.make_store(0)
        self._uploads: Any = found.make_store(_MAX_TRIES - 1) if is_remote else None
        self._budget = RetryBudget()
        self._cost = RequestCost(_REMOTE_GAP_BYTES if is_remote else _LOCAL_GAP_BYTES)
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self.num_retries = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.last_error = ""

    def __repr__(self) -> str:
        return f"ObjectClient({self._place})"

    @property
    def _store(self) -> Any:
        if self._opened is None:
            self._opened = self._make_store(0)
        return self._opened

    @property
    def directory(self) -> Path | None:
        """Return where everything is, if the store is a directory."""
        return None if self._directory is None else self._directory.root

    @property
    def max_span_bytes(self) -> int:
        """Return the longest range to ask for at once; requests to a directory are for free."""
        return _REMOTE_SPAN_BYTES if self._is_remote else _LOCAL_SPAN_BYTES

    @property
    def gap_bytes(self) -> int:
        """Return the bytes that may as well be read as skipped by another request."""
        return self._cost.gap_bytes

    @property
    def requests(self) -> dict[str, int]:
        """Return the requests so far by kind, with retries but without the parts of an upload."""
        with self._lock:
            return dict(self._requests)

    def get_range(
        self,
        path: str,
        start: int,
        end: int,
        *,
        until: float | None = None,
        into: memoryview | None = None,
    ) -> memoryview:
        """Return bytes ``start`` to ``end``, or fewer where the object ends before; of a directory
        in ``into``, where they fit. No retry begins after ``until`` (``time.monotonic``)."""
        began = time.monotonic()
        if self._directory is not None and into is not None and end - start <= len(into):
            folder, room = self._directory, into[: end - start]
            data = room[: self._read("get", lambda: folder.read(path, room, start), until)]
        else:
            found = self._read(
                "get", lambda: obstore.get_range(self._store, path, start=start, end=end), until
            )
            data = memoryview(found)
        self._count_in(len(data))
        self._cost.observe(len(data), time.monotonic() - began)
        return data

    def get_cached(self, path: str, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers, one after the other, with what memory holds of a directory's file from
        ``start`` on; returns how many bytes, and 0 for anything amiss. Never waits for storage, so
        the buffers may belong to a caller with a deadline."""
        if self._directory is None:
            return 0
        began = time.monotonic()
        num_read = self._directory.read_cached(path, buffers, start)
        if num_read:
            self._count("get")
            self._count_in(num_read)
            self._cost.observe(num_read, time.monotonic() - began)
            self._budget.earn()
            self._tell(None)
        return num_read

    def get(self, path: str, max_bytes: int = MAX_MANIFEST_BYTES) -> memoryview:
        """Return a whole object, or nothing of one that is longer, which is not read."""
        began = time.monotonic()
        data = self._read("get", lambda: self._whole(path, max_bytes))
        self._count_in(len(data))
        self._cost.observe(len(data), time.monotonic() - began)
        return memoryview(data)

    def _whole(self, path: str, max_bytes: int) -> Any:
        found = obstore.get(self._store, path)
        return found.bytes() if found.meta["size"] <= max_bytes else b""

    def size(self, path: str) -> int:
        return int(self._read("head", lambda: obstore.head(self._store, path))["size"])

    def listing(self, folder: str, *, after: str | None = None) -> Iterator[list[Listed]]:
        """Yield what is in a folder, in parts, from the name behind ``after`` on. The order is that
        of names where the store lists so, which directories do not."""
        offset = f"{folder}/{after}" if after else None
        stream: Any = None

        def next_chunk() -> Any:
            nonlocal stream
            if stream is None:
                store = self._store
                stream = iter(obstore.list(store, folder, offset=offset, chunk_size=_LIST_CHUNK))
            return next(stream, None)

        while True:
            # A stream that failed is at its end; the caller lists again.
            chunk = self._read("list", next_chunk, num_tries=1)
            if chunk is None:
                return
            yield [Listed(m["path"], m["size"], m["last_modified"].timestamp()) for m in chunk]
            if len(chunk) < _LIST_CHUNK and self._is_remote:
                return  # the last page said so: no further request

    def folders(self, folder: str) -> list[str]:
        """Return the paths of the folders in a folder."""
        found = self._read("list", lambda: obstore.list_with_delimiter(self._store, folder))
        return list(found["common_prefixes"])

    def put(self, path: str, data: bytes | bytearray) -> None:
        """Write an object, whole or not at all; durable where the store is a directory. The caller
        must not change ``data`` afterwards."""
        num_requests = self.num_puts(len(data))
        if num_requests > 1:
            self._write("put", lambda: self._put_parts(path, data), num_tries=1)
            self._count("put", num_requests - 1)
        else:
            self._write("put", lambda: self._put_whole(path, data))
        with self._lock:
            self.bytes_out += len(data)

    def num_puts(self, num_bytes: int) -> int:
        """Return how many requests an object of that length takes: parts, begin and complete."""
        if not self._is_remote or num_bytes <= MULTIPART_BYTES:
            return 1
        return -(-num_bytes // MULTIPART_BYTES) + 2

    def _put_whole(self, path: str, data: bytes | bytearray) -> None:
        obstore.put(self._store, path, data, use_multipart=False)
        if self._directory is not None:
            self._directory.sync(path)

    def _put_parts(self, path: str, data: bytes | bytearray) -> None:
        obstore.put(self._uploads, path, data, chunk_size=MULTIPART_BYTES, max_concurrency=4)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; a missing one counts as deleted."""
        for start in range(0, len(paths), _MAX_DELETES):
            self._delete(list(paths[start : start + _MAX_DELETES]))

    def _delete(self, paths: list[str]) -> None:
        if self._is_remote and len(paths) > 1:
            with contextlib.suppress(_NotFoundError):
                self._write("delete", lambda: obstore.delete(self._store, paths))
                return
        for path in paths:
            with contextlib.suppress(_NotFoundError):
                self._write("delete", lambda path=path: obstore.delete(self._store, path))  # type: ignore[misc]

    def _read(
        self,
        kind: str,
        request: Callable[[], Any],
        until: float | None = None,
        num_tries: int = _MAX_TRIES,
    ) -> Any:
        try:
            found = self._tried(kind, request, until, num_tries)
        except RequestError as error:
            answered = error.failure in (Failure.NOT_FOUND, Failure.BAD_RANGE)
            self._tell(None if answered else error)
            raise
        self._tell(None)
        return found

    def _write(self, kind: str, request: Callable[[], Any], num_tries: int = _MAX_TRIES) -> None:
        self._tried(kind, request, None, num_tries)

    def _tell(self, error: RequestError | None) -> None:
        if self.on_outcome is not None:
            self.on_outcome(error)

    def _tried(
        self, kind: str, request: Callable[[], Any], until: float | None, num_tries: int
    ) -> Any:
        """Retry what may pass: only within the timeout of one request, so that a store which
        answers late is not waited for three times."""
        end = time.monotonic() + self._timeout_s
        if until is not None:
            end = min(end, until)
        for attempt in range(num_tries):
            self._count(kind)
            try:
                found = request()
            except Exception as error:
                cause = explain(error, kind)
                if cause.failure is Failure.NOT_FOUND:
                    raise _NotFoundError(cause.failure, cause.clause) from None
                with self._lock:
                    self.last_error = cause.clause
                pause = FIRST_PAUSE_S * 4**attempt * random.uniform(0.5, 1.5)
                last = attempt + 1 == num_tries or time.monotonic() + pause >= end
                if cause.failure is not Failure.UNAVAILABLE or last or not self._budget.take():
                    raise cause from None
                with self._lock:
                    self.num_retries += 1
                time.sleep(pause)
            else:
                self._budget.earn()
                return found
        raise AssertionError("unreachable")

    def _count(self, kind: str, number: int = 1) -> None:
        with self._lock:
            self._requests[kind] += number

    def _count_in(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_in += num_bytes


class _NotFoundError(RequestError):
    """The object is missing, for callers that expect this."""


def open_client(
    settings: ObjectSettings,
    *,
    on_outcome: Callable[[RequestError | None], None] | None = None,
) -> ObjectClient:
    """Return a client for the URL of the settings. It touches nothing but, for a file URL, the
    directory.

    Raises ``ConfigError`` for an invalid URL, or without obstore.
    """
    return ObjectClient(
        find_store(settings),
        place=settings.url,
        timeout_s=settings.request_timeout_s,
        on_outcome=on_outcome,
    )
