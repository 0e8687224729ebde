"""Requests to the bucket, the only place that knows obstore: opening by URL, retries, counting.

Credentials, region and endpoint come from the environment as S3's own tools read it (``AWS_*``;
Google's and Azure's likewise). TLS is the rule: plain HTTP is spoken only where the endpoint says
``http://`` or ``AWS_ALLOW_HTTP`` is set. Nothing of them is kept, shown or logged here.

A buffer given to ``put`` must never change afterwards: a request that timed out may still read it,
and a store in memory keeps it.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.object.budgets import RequestCost, RetryBudget
from sglang_tiered.storage.object.directory import Directory
from sglang_tiered.storage.object.failures import Failure, RequestError, explain

try:
    import obstore
    from obstore import store as obstore_stores
except ImportError:  # the tier is optional: only opening it asks for the library
    obstore = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.storage.object.settings import ObjectSettings

__all__ = ["Listed", "ObjectClient", "open_client"]

REMOTE = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
MULTIPART_BYTES = 17 << 20
"""Larger objects go up in parts of this size: few requests, and each ends within its timeout. A
payload of 16 MiB and its manifest are one."""

_MAX_TRIES = 3
_FIRST_PAUSE_S = 0.05
_REMOTE_GAP_BYTES = 1 << 20  # until it is measured
_LOCAL_GAP_BYTES = 64 << 10
_REMOTE_SPAN_BYTES = 8 << 20
_LOCAL_SPAN_BYTES = 1 << 20
_LIST_CHUNK = 1000
_MAX_DELETES = 1000
_CONNECT = timedelta(seconds=5)

_memory_stores: dict[str, Any] = {}  # by URL: engines of one process share them
_memory_lock = threading.Lock()


class Listed(NamedTuple):
    """One object of a listing."""

    path: str
    size: int
    modified: float  # seconds since 1970, as the store says


class ObjectClient:
    """Blocking requests under one prefix; thread-safe. Every method raises ``RequestError``.

    ``on_outcome`` is told, after the retries, of every request that reads whether it was answered
    (None) or why not.
    """

    def __init__(
        self,
        make_store: Callable[[int], Any],
        *,
        place: str,
        is_remote: bool,
        directory: Path | None = None,
        timeout_s: float = 10.0,
        on_outcome: Callable[[RequestError | None], None] | None = None,
    ) -> None:
        self._directory = None if directory is None else Directory(directory)
        self._timeout_s = timeout_s
        self._is_remote = is_remote
        self._place = place
        self.on_outcome = on_outcome
        # Requests are retried here, by budget and deadline; parts of an upload by the library.
        self._make_store = make_store
        self._opened: Any = None
        with contextlib.suppress(OSError):  # a directory that is not there may come yet
            self._opened = make_store(0)
        self._uploads: Any = make_store(_MAX_TRIES - 1) if is_remote else None
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
        """Where everything is, if the store is a directory."""
        return None if self._directory is None else self._directory.root

    @property
    def max_span_bytes(self) -> int:
        """The longest range to ask for at once; requests to a directory are for free."""
        return _REMOTE_SPAN_BYTES if self._is_remote else _LOCAL_SPAN_BYTES

    @property
    def gap_bytes(self) -> int:
        """The bytes that may as well be read as skipped by another request."""
        return self._cost.gap_bytes

    @property
    def requests(self) -> dict[str, int]:
        """Requests made so far by kind, retries included (but those of parts of an upload)."""
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
        """Bytes ``start`` to ``end``, or fewer where the object ends before; of a directory in
        ``into``, where they fit. No retry begins after ``until`` (``time.monotonic``)."""
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

    def get(self, path: str) -> memoryview:
        """A whole object, which should be small."""
        began = time.monotonic()
        data = self._read("get", lambda: obstore.get(self._store, path).bytes())
        self._count_in(len(data))
        self._cost.observe(len(data), time.monotonic() - began)
        return memoryview(data)

    def size(self, path: str) -> int:
        return int(self._read("head", lambda: obstore.head(self._store, path))["size"])

    def listing(self, folder: str, *, after: str | None = None) -> Iterator[list[Listed]]:
        """What is in a folder, in parts, from the name behind ``after`` on. The order is that of
        names where the store lists so, which directories do not."""
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
        """The paths of the folders in a folder."""
        found = self._read("list", lambda: obstore.list_with_delimiter(self._store, folder))
        return list(found["common_prefixes"])

    def put(self, path: str, data: bytes | bytearray) -> None:
        """Write an object, whole or not at all; durable where the store is a directory. ``data``
        must not change any more."""
        num_requests = self.num_puts(len(data))
        if num_requests > 1:
            self._write("put", lambda: self._put_parts(path, data), num_tries=1)
            self._count("put", num_requests - 1)
        else:
            self._write("put", lambda: self._put_whole(path, data))
        with self._lock:
            self.bytes_out += len(data)

    def num_puts(self, num_bytes: int) -> int:
        """The requests that an object of that length takes: its parts, begin and complete."""
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
        """Delete objects; one that is not there is none too many."""
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
                pause = _FIRST_PAUSE_S * 4**attempt * random.uniform(0.5, 1.5)
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
    """So that those who do not mind can say so."""


def open_client(
    settings: ObjectSettings,
    *,
    on_outcome: Callable[[RequestError | None], None] | None = None,
) -> ObjectClient:
    """A client for the URL of the settings. Touches nothing but, for a file URL, the directory.

    Raises ``ConfigError`` for a URL that cannot be one of ours, or without obstore.
    """
    if obstore is None:
        raise ConfigError("the object tier needs the package obstore: pip install obstore")
    try:
        parts = urlsplit(settings.url)
        is_bare = not (parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:
        raise ConfigError("the URL of the object tier is not one") from None
    if not is_bare:
        raise ConfigError(
            "the URL of the object tier must hold nothing but scheme, bucket and prefix: "
            "credentials come from the environment"
        )
    if settings.sse is not None and parts.scheme not in ("s3", "s3a"):
        raise ConfigError(f"sse is of S3 only, and the object tier is at {parts.scheme}://")
    directory: Path | None = None
    make_store: Callable[[int], Any]
    if parts.scheme == "memory":
        with _memory_lock:
            store = _memory_stores.setdefault(settings.url, obstore_stores.MemoryStore())
        make_store = lambda _: store  # noqa: E731
    elif parts.scheme == "file":
        directory = folder = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not directory.is_absolute():
            raise ConfigError(f"{settings.url} must be a file URL of an absolute path")
        make_store = lambda _: _directory_store(folder)  # noqa: E731
    elif parts.scheme in REMOTE and parts.netloc:
        make_store = lambda retries: _remote_store(settings, retries)  # noqa: E731
    else:
        raise ConfigError(
            f"{settings.url} is not a place for the object tier: pass s3://bucket/prefix, gs://, "
            "az:// or the file URL of a directory"
        )
    return ObjectClient(
        make_store,
        place=settings.url,
        is_remote=parts.scheme in REMOTE,
        directory=directory,
        timeout_s=settings.request_timeout_s,
        on_outcome=on_outcome,
    )


def _directory_store(directory: Path) -> Any:
    """Raises ``OSError`` for a directory that cannot be made."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return obstore_stores.LocalStore(directory)


def _remote_store(settings: ObjectSettings, max_retries: int) -> Any:
    timeout = timedelta(seconds=settings.request_timeout_s)
    client: dict[str, Any] = {"timeout": timeout, "connect_timeout": min(timeout, _CONNECT)}
    config: Any = {}
    if urlsplit(settings.url).scheme in ("s3", "s3a"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT") or ""
        allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
        client["allow_http"] = endpoint.lower().startswith("http://") or allowed
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            client["root_certificate"] = _certificates(bundle)
        if settings.sse is not None:
            config["server_side_encryption"] = settings.sse
        if settings.sse_kms_key is not None:
            config["sse_kms_key_id"] = settings.sse_kms_key
    retry: dict[str, Any] = {
        "max_retries": max_retries,
        "retry_timeout": timeout,
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=1),
            "base": 4,
        },
    }
    try:
        options: dict[str, Any] = {"client_options": client, "retry_config": retry}
        return obstore_stores.from_url(settings.url, config=config or None, **options)
    except Exception as error:
        # Its text may repeat what is in the environment.
        raise ConfigError(
            f"{settings.url} cannot be opened as an object store ({type(error).__name__}): check "
            "the URL and the variables in the environment that configure it"
        ) from None


def _certificates(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"AWS_CA_BUNDLE {path} cannot be read: {error.strerror}") from None
