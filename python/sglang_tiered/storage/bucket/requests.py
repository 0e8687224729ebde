"""Requests to a bucket: how ``obstore`` is opened and asked, what went wrong, and when not to ask.

The text of a library's error names the endpoint, and a refusal repeats the key id: it is read here
to tell causes apart, and goes no further.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import os
import re
import threading
import time
from collections import Counter
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import requests

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import require
from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.base import Health
from sglang_tiered.storage.bucket.directory import LISTED_AT_ONCE, Directory, Listed
from sglang_tiered.storage.jobs import call_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


try:
    import obstore
    from obstore import store as obstore_stores
except ImportError:  # the tier is optional: only opening it asks for the library
    obstore = None  # type: ignore[assignment]


logger = logging.getLogger(__name__)

_OWNERS = {"s3": "AWS", "s3a": "AWS", "gs": "GOOGLE"}
_CONNECT = timedelta(seconds=5)
_YES = ("1", "true", "yes")
_RETRIES = {
    "max_retries": 2,
    "backoff": {
        "init_backoff": timedelta(seconds=0.05),
        "max_backoff": timedelta(seconds=1),
        "base": 4,
    },
}
_MULTIPART_BYTES = 64 << 20
"""Longer pages go up in parts, each of which ends within its timeout."""
_PART_BYTES = 16 << 20
_SIGNED_FOR = timedelta(minutes=5)

_memory_stores: dict[str, Any] = {}  # by URL: engines of one process share them
_memory_lock = threading.Lock()


_DELETED_AT_ONCE = 1000  # by a bulk delete
_NOT_OFFERED = (400, 405, 501)  # answers to a bulk delete
_NUM_AT_ONCE = 8  # requests under way of those that are asked for together

_FAILURES_TOLERATED = 2

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class Remote:
    """The objects of a bucket (S3, GCS, Azure), by ``obstore``. It retries, with pauses, within the
    timeout of one request; it is configured here alone.

    Credentials, region and endpoint come from the environment as S3's own tools read it (``AWS_*``;
    Google's and Azure's likewise). TLS is the rule: plain HTTP is spoken only where the endpoint
    says ``http://`` or ``AWS_ALLOW_HTTP`` (``GOOGLE_``, ``AZURE_``) is set. Nothing of them is
    kept, shown or logged here.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        scheme = urlsplit(url).scheme
        self._timeout_s = timeout_s
        self.deletes_in_bulk = _OWNERS.get(scheme) == "AWS"
        self._store: Any
        if scheme == "memory":
            with _memory_lock:
                self._store = _memory_stores.setdefault(url, obstore_stores.MemoryStore())
        else:
            self._store = _open_store(url, _OWNERS.get(scheme, "AZURE"), timeout_s)

    def read(self, path: str, nbytes: int, into: memoryview | None = None) -> memoryview:
        """Return the first bytes of an object, in memory of the library's own."""
        return memoryview(obstore.get_range(self._store, path, start=0, end=nbytes))

    def modified(self, path: str) -> float:
        """Return when an object was written, by the store's clock."""
        return float(obstore.head(self._store, path)["last_modified"].timestamp())

    def listing(self, folder: str, after: str | None) -> Iterator[list[Listed]]:
        """Yield what is in a folder and below it, as ``Directory.listing`` does."""
        for chunk in obstore.list(self._store, folder, offset=after, chunk_size=LISTED_AT_ONCE):
            yield [
                Listed(m["path"], m["size"], m["last_modified"].timestamp(), m["e_tag"] or "")
                for m in chunk
            ]

    def folders(self, folder: str) -> list[str]:
        return sorted(obstore.list_with_delimiter(self._store, folder)["common_prefixes"])

    def write(self, path: str, data: bytes | memoryview) -> None:
        parts = len(data) > _MULTIPART_BYTES
        obstore.put(self._store, path, data, use_multipart=parts, chunk_size=_PART_BYTES)

    def replace(self, listed: Listed, data: bytes) -> bool:
        """Write in the place of what was listed; returns whether that was still so. Where the store
        cannot tell, it goes in the place of any."""
        mode: Any = {"e_tag": listed.tag}
        try:
            obstore.put(self._store, listed.path, data, mode=mode, use_multipart=False)
        except (obstore.exceptions.PreconditionError, obstore.exceptions.NotFoundError):
            return False
        except (obstore.exceptions.GenericError, obstore.exceptions.NotSupportedError):
            self.write(listed.path, data)
        return True

    def remove_all(self, paths: list[str]) -> None:
        """Remove objects by one request, which not every S3 has (``POST ?delete``)."""
        obstore.delete(self._store, paths)

    def remove(self, path: str) -> None:
        """The library deletes one object of an S3 by a bulk request too: there it only signs."""
        if not isinstance(self._store, obstore_stores.S3Store):
            obstore.delete(self._store, path)
            return
        url = obstore.sign(self._store, "DELETE", path, _SIGNED_FOR)
        bundle = os.environ.get("AWS_CA_BUNDLE") or True
        answer = requests.delete(url, timeout=self._timeout_s, verify=bundle)
        if not answer.ok and answer.status_code != 404:
            raise OSError(f"status code: {answer.status_code}")  # without the signed URL


def _open_store(url: str, owner: str, timeout_s: float) -> Any:
    timeout = timedelta(seconds=timeout_s)
    client: dict[str, Any] = {"timeout": timeout, "connect_timeout": min(timeout, _CONNECT)}
    # Options given here take the place of those that the library finds in the environment.
    client["allow_http"] = os.environ.get(f"{owner}_ALLOW_HTTP", "").lower() in _YES
    if owner == "AWS":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT") or ""
        client["allow_http"] |= endpoint.lower().startswith("http://")
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            client["root_certificate"] = _certificates(bundle)
    retry: dict[str, Any] = {**_RETRIES, "retry_timeout": timeout}
    try:
        options: dict[str, Any] = {"client_options": client, "retry_config": retry}
        return obstore_stores.from_url(url, **options)
    except Exception as error:
        # Its text may repeat what is in the environment.
        raise ConfigError(
            f"{url} cannot be opened as an object store ({type(error).__name__}): check "
            "the URL and the variables in the environment that configure it"
        ) from None


def _certificates(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"AWS_CA_BUNDLE {path} cannot be read: {error.strerror}") from None


class Failure(enum.Enum):
    NOT_FOUND = "not_found"  # the object is missing
    BAD_RANGE = "bad_range"  # the object is shorter than it should be
    DENIED = "denied"  # credentials are missing, refused or expired, or the bucket is not there
    UNAVAILABLE = "unavailable"  # no connection, no answer in time, 5xx, throttled


class BucketError(Exception):
    """A request that failed after its retries; ``clause`` may be shown to anyone. ``status``: what
    it was answered with."""

    def __init__(self, failure: Failure, clause: str, status: int | None = None) -> None:
        super().__init__(clause)
        self.failure = failure
        self.clause = clause
        self.status = status


_STATUS = re.compile(r"status code: (\d{3})")
_CAUSES = [
    (re.compile(pattern), failure, what)
    for pattern, failure, what in (
        ("NoSuchBucket", Failure.DENIED, "found no such bucket"),
        ("FileNotFoundError", Failure.NOT_FOUND, "found no such object"),
        (
            "status code: 416|InvalidRange|StartTooLarge|Wanted range starting",
            Failure.BAD_RANGE,
            "asked beyond the end of an object",
        ),
        (
            "/latest/api/token|/latest/meta-data|/computeMetadata/|metadata/identity",
            Failure.DENIED,
            "found no credentials in the environment",
        ),
        (
            "ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken"
            "|TokenRefreshRequired",
            Failure.DENIED,
            "was refused: the credentials are wrong or expired",
        ),
        (
            "PermissionDeniedError|UnauthenticatedError|PermissionError|status code: 40[13]",
            Failure.DENIED,
            "was refused: no permission",
        ),
        ("BadScheme", Failure.DENIED, "was not sent: the endpoint is not https"),
        (_STATUS.pattern, Failure.UNAVAILABLE, "was answered with status {}"),
        ("Timeout|TimedOut", Failure.UNAVAILABLE, "was not answered in time"),
        ("kind: Connect", Failure.UNAVAILABLE, "found no connection"),
    )
]
"""What the names of an exception's classes and its text say: the first that is found."""


def explain(error: BaseException, kind: str) -> BucketError:
    """Return the cause of an exception that a request of this kind raised."""
    text = " ".join([*(each.__name__ for each in type(error).__mro__), str(error)])
    match = _STATUS.search(text)
    status = int(match[1]) if match else None
    for pattern, failure, what in _CAUSES:
        if pattern.search(text):
            return BucketError(failure, f"{kind} {what.format(status)}", status)
    strerror = error.strerror if isinstance(error, OSError) else None
    what = f"failed: {strerror}" if strerror else f"failed ({type(error).__name__})"
    return BucketError(Failure.UNAVAILABLE, f"{kind} {what}", status)


def tried(doing: str, step: Callable[..., object], *arguments: object) -> bool:
    """Return whether a step of a thread succeeded. Whatever it raises, the thread goes on."""
    try:
        step(*arguments)
    except BucketError:
        return False  # the requests know, and say so
    except BaseException:  # a panic of the library is no Exception
        logger.exception("internal error while %s; it is tried again", doing)
        return False
    return True


def _open(url: str, timeout_s: float) -> Directory | Remote:
    """Open what a URL names, touching nothing but a directory. Raises ``ConfigError`` if it cannot
    be, or without obstore."""
    require("the object tier", "obstore")
    if obstore is None:
        raise ConfigError("obstore is installed but cannot be imported; install it anew.")
    parts = urlsplit(url)
    if parts.scheme != "file":
        return Remote(url, timeout_s)
    directory = Path(unquote(parts.path))
    with contextlib.suppress(OSError):  # one that is not there may come yet
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Directory(directory)


class Requests:
    """Blocking requests under one prefix: ``s3://bucket/prefix``, ``gs://``, ``az://``, the file
    URL of a directory, or ``memory://name``. Thread-safe. Every method raises ``BucketError``, and
    each does from ``close`` on, so whatever asks again and again ends.

    ``breaker`` notes every request that reads. Opening touches nothing but, for a file URL, the
    directory; it raises ``ConfigError`` without obstore, or for an environment that does not fit.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        on_open: Callable[[], None] | None = None,
    ) -> None:
        self._place = _open(url, timeout_s)
        self.breaker = Breaker(clock, url, on_open)
        self._closed = False
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._troubles: dict[str, str] = {}
        self.bytes_in = 0

    @property
    def directory(self) -> Path | None:
        """Return where everything is, if the bucket is a directory."""
        return self._place.root if isinstance(self._place, Directory) else None

    @property
    def reads_in_place(self) -> bool:
        """Return whether ``read_cached`` may find anything."""
        return isinstance(self._place, Directory) and self._place.offers_cached

    @property
    def requests(self) -> dict[str, int]:
        """Return the requests so far by kind, without the library's retries and parts."""
        with self._lock:
            return dict(self._requests)

    @property
    def troubles(self) -> dict[str, str]:
        """Return why the last put or delete failed, as one clause each, by kind."""
        with self._lock:
            return dict(self._troubles)

    def close(self) -> None:
        """Refuse what is asked from now on; requests under way go on."""
        self._closed = True

    def each(self, call: Callable[[_Item], _Found], items: Iterable[_Item]) -> Iterator[_Found]:
        """Call for some items at a time, as many as may be asked for together; yields what was
        returned, in their order."""
        rest = iter(items)
        while some := list(itertools.islice(rest, _NUM_AT_ONCE)):
            found = call_each(call, some, _NUM_AT_ONCE)
            wait(found)
            yield from (each.result() for each in found)

    def get(self, path: str, nbytes: int, *, into: memoryview | None = None) -> memoryview:
        """Return the first ``nbytes`` of an object, or all where it is shorter; of a directory in
        ``into``, where they fit."""
        data: memoryview = self._ask("get", lambda: self._place.read(path, nbytes, into))
        with self._lock:
            self.bytes_in += len(data)
        return data

    def whole(self, listed: Listed) -> memoryview | None:
        """Return an object that was listed; None where it is gone."""
        try:
            return self.get(listed.path, max(listed.size, 1))
        except BucketError as error:
            if error.failure is Failure.BAD_RANGE:
                return memoryview(b"")
            if error.failure is not Failure.NOT_FOUND:
                raise
            return None

    def open_cached(self, path: str) -> int | None:
        """Open a directory's file, which may wait for storage; None for anything amiss."""
        assert isinstance(self._place, Directory)
        return self._place.open_cached(path)

    def read_cached(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers with what memory holds of a file; returns how many bytes, and 0 for anything
        amiss. Never waits for storage."""
        assert isinstance(self._place, Directory)
        num_read = self._place.read_cached(fd, buffers)
        if num_read:
            with self._lock:
                self._requests["get"] += 1
                self.bytes_in += num_read
            self.breaker.note(None)
        return num_read

    def modified(self, path: str) -> float | None:
        """Return when an object was written, by the store's clock; None where it is missing."""
        try:
            return float(self._ask("head", lambda: self._place.modified(path)))
        except BucketError as error:
            if error.failure is not Failure.NOT_FOUND:
                raise
            return None

    def listing(self, folder: str, *, after: str | None = None) -> Iterator[list[Listed]]:
        """Yield what is in a folder and below it, in parts and in the order of paths, from the path
        behind ``after`` on."""
        parts = self._place.listing(folder, after)
        while part := self._ask("list", lambda: next(parts, None)):
            yield part
            if len(part) < LISTED_AT_ONCE:
                return  # the last one: no further request

    def folders(self, folder: str) -> list[str]:
        """Return the paths of the folders in a folder."""
        return list(self._ask("list", lambda: self._place.folders(folder)))

    def put(self, path: str, data: bytes | memoryview) -> None:
        """Write an object, whole or not at all; durable where the store is a directory."""
        self._ask("put", lambda: self._place.write(path, data))

    def replace(self, listed: Listed, data: bytes) -> bool:
        """Write an object in the place of one that was listed; returns whether that was still so.
        Where the store cannot tell, it goes in the place of any."""
        return bool(self._ask("put", lambda: self._place.replace(listed, data)))

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, many by one request; where that is not offered, all are single from then
        on. A missing one counts as deleted."""
        rest, place = list(paths), self._place
        while rest and isinstance(place, Remote) and place.deletes_in_bulk:
            some = rest[:_DELETED_AT_ONCE]
            try:
                self._ask("delete", partial(place.remove_all, some))
                del rest[: len(some)]
            except BucketError as error:
                if error.failure is Failure.DENIED or error.status not in _NOT_OFFERED:
                    raise  # 400 also answers a token that is over
                place.deletes_in_bulk = False
        for _ in self.each(lambda path: self._ask("delete", partial(place.remove, path)), rest):
            pass

    def _ask(self, kind: str, request: Callable[[], Any]) -> Any:
        """Make one request, and note how it ended: puts and deletes here, others by the
        breaker. Raises ``BucketError``."""
        if self._closed:
            raise BucketError(Failure.UNAVAILABLE, f"{kind} was not sent: the tier is closed")
        with self._lock:
            self._requests[kind] += 1
        answer = cause = None
        try:
            answer = request()
        except Exception as error:
            cause = explain(error, kind)
        is_missing = cause is not None and cause.failure is Failure.NOT_FOUND
        if kind == "delete" and is_missing:
            cause = None
        if kind in ("put", "delete"):
            with self._lock:
                self._troubles.pop(kind, None)
                if cause is not None:
                    self._troubles[kind] = cause.clause
        else:
            is_answered = is_missing or cause is None or cause.failure is Failure.BAD_RANGE
            self.breaker.note(None if is_answered else cause)
        if cause is not None:
            raise cause from None
        return answer


class Breaker:
    """RUNNING -> MISS_ONLY after failed reads in a row, of whatever thread. From then on only the
    discovery thread asks, one probe after a pause that doubles, and the first that succeeds brings
    RUNNING back. A store on a disk lets loads be the probes; here these may take seconds.

    A bucket that never answered yet gets no benefit of the doubt: its first failure opens.
    Thread-safe. ``stores``: pauses behind puts that failed, while loads go on."""

    def __init__(
        self, clock: Callable[[], float], name: str, on_open: Callable[[], None] | None
    ) -> None:
        self._name = name
        self._on_open = on_open
        self._lock = threading.Lock()
        self._tolerated = 0  # failures in a row
        self._cause = ""
        self.probes = Backoff(clock)  # open while one failed
        self.stores = Backoff(clock)

    @property
    def is_open(self) -> bool:
        return self.probes.num_failures > 0

    def accepts_stores(self) -> bool:
        return not self.is_open and self.stores.is_over

    def diagnosis(self) -> tuple[Health, str]:
        """Return the state of now and why; the reason is empty while RUNNING."""
        with self._lock:
            return (Health.MISS_ONLY, self._cause) if self.is_open else (Health.RUNNING, "")

    def note(self, error: BucketError | None) -> None:
        """Note a request that reads: None was answered, if only by "not found"; an error after its
        retries."""
        if error is not None:
            self._fail(error.clause, self._tolerated)
            return
        with self._lock:
            was_open, self._tolerated = self.is_open, _FAILURES_TOLERATED
            self.probes.succeed()
        if was_open:
            logger.info("%s answers again", self._name)

    def fault(self, what: str) -> None:
        """Note that the engine failed, not the bucket, in an except clause: misses until a probe
        succeeds."""
        logger.exception("%s: internal error while %s", self._name, what)
        self._fail(f"internal error while {what}", 0)

    def _fail(self, cause: str, tolerated: int) -> None:
        with self._lock:
            was_open, self._cause = self.is_open, cause
            self.probes.fail(tolerated)
            opens = self.is_open and not was_open
        if opens and self._on_open is not None:  # else nobody heeds it, as a command
            self._on_open()
            logger.warning("%s: %s; every lookup misses until it works again", self._name, cause)
