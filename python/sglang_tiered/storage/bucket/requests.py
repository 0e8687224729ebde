"""Requests to a bucket: what they took, and what went wrong. The library retries, with pauses,
within the timeout of one request; it is configured here alone.

Credentials, region and endpoint come from the environment as S3's own tools read it (``AWS_*``;
Google's and Azure's likewise). TLS is the rule: plain HTTP is spoken only where the endpoint says
``http://`` or ``AWS_ALLOW_HTTP`` (``GOOGLE_``, ``AZURE_``) is set. Nothing of them is kept, shown
or logged here. The text of a library's error names the endpoint, and a refusal repeats the key id:
it is read here to tell causes apart, and goes no further.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from sglang_tiered.errors import ConfigError
from sglang_tiered.extras import require
from sglang_tiered.storage.bucket.directory import Directory, Listed

try:
    import obstore
    from obstore import store as obstore_stores
except ImportError:  # the tier is optional: only opening it asks for the library
    obstore = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.storage.bucket.settings import BucketSettings

__all__ = ["Failure", "RequestError", "Requests", "explain"]

_NUM_RETRIES = 2
_FIRST_PAUSE = timedelta(seconds=0.05)

_REMOTE = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
_CONNECT = timedelta(seconds=5)
_YES = ("1", "true", "yes")

_memory_stores: dict[str, Any] = {}  # by URL: engines of one process share them
_memory_lock = threading.Lock()

_MULTIPART_BYTES = 64 << 20
"""Longer pages go up in parts, each of which ends within its timeout."""
_PART_BYTES = 16 << 20
_AT_ONCE = 1000  # names of a listing, and of a bulk delete
_NUM_SINGLE = 8  # deletes under way, where there are no bulk ones
_SIGNED_FOR = timedelta(minutes=5)


class Failure(enum.Enum):
    NOT_FOUND = "not_found"  # the object is missing
    BAD_RANGE = "bad_range"  # the object is shorter than it should be
    DENIED = "denied"  # credentials are missing, refused or expired, or the bucket is not there
    UNAVAILABLE = "unavailable"  # no connection, no answer in time, 5xx, throttled


class RequestError(Exception):
    """A request that failed after its retries; ``clause`` may be shown to anyone."""

    def __init__(self, failure: Failure, clause: str) -> None:
        super().__init__(clause)
        self.failure = failure
        self.clause = clause


_STATUS = re.compile(r"status code: (\d{3})")
_CREDENTIALS = re.compile(
    r"ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|TokenRefreshRequired"
)
_METADATA = re.compile(r"/latest/api/token|/latest/meta-data|/computeMetadata/|metadata/identity")
_RANGE = re.compile(r"InvalidRange|StartTooLarge|Wanted range starting")
_DENIED_TYPES = ("PermissionDeniedError", "UnauthenticatedError")


def explain(error: BaseException, kind: str) -> RequestError:
    """Return the cause of an exception that a request of this kind raised."""
    text, name = str(error), type(error).__name__
    match = _STATUS.search(text)
    status = int(match[1]) if match else None

    def said(failure: Failure, what: str) -> RequestError:
        return RequestError(failure, f"{kind} {what}")

    if "NoSuchBucket" in text:
        return said(Failure.DENIED, "found no such bucket")
    if isinstance(error, FileNotFoundError):
        return said(Failure.NOT_FOUND, "found no such object")
    if status == 416 or _RANGE.search(text):
        return said(Failure.BAD_RANGE, "asked beyond the end of an object")
    if _METADATA.search(text):
        return said(Failure.DENIED, "found no credentials in the environment")
    if _CREDENTIALS.search(text):
        return said(Failure.DENIED, "was refused: the credentials are wrong or expired")
    if name in _DENIED_TYPES or isinstance(error, PermissionError) or status in (401, 403):
        return said(Failure.DENIED, "was refused: no permission")
    if "BadScheme" in text:
        return said(Failure.DENIED, "was not sent: the endpoint is not https")
    if status is not None:
        return said(Failure.UNAVAILABLE, f"was answered with status {status}")
    if "Timeout" in text or "TimedOut" in text:
        return said(Failure.UNAVAILABLE, "was not answered in time")
    if "kind: Connect" in text:
        return said(Failure.UNAVAILABLE, "found no connection")
    if isinstance(error, OSError) and error.strerror:
        return said(Failure.UNAVAILABLE, f"failed: {error.strerror}")
    return said(Failure.UNAVAILABLE, f"failed ({name})")


def _find_store(settings: BucketSettings) -> tuple[Any, bool, Directory | None]:
    """Return a URL's store of the library, whether it is remote, and the directory that it is,
    touching nothing but that. Raises ``ConfigError`` if it is invalid or obstore missing."""
    require("the object tier", "obstore")
    if obstore is None:
        raise ConfigError("obstore is installed but cannot be imported; install it anew.")
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
    directory: Path | None = None
    store: Any = None
    if parts.scheme == "memory":
        with _memory_lock:
            store = _memory_stores.setdefault(settings.url, obstore_stores.MemoryStore())
    elif parts.scheme == "file":
        directory = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not directory.is_absolute():
            raise ConfigError(f"{settings.url} must be a file URL of an absolute path")
        with contextlib.suppress(OSError):  # one that is not there may come yet
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif parts.scheme in _REMOTE and parts.netloc:
        store = _remote_store(settings)
    else:
        raise ConfigError(
            f"{settings.url} is not a place for the object tier: pass s3://bucket/prefix, gs://, "
            "az:// or the file URL of a directory"
        )
    found = None if directory is None else Directory(directory)
    return store, parts.scheme in _REMOTE, found


def _remote_store(settings: BucketSettings) -> Any:
    timeout = timedelta(seconds=settings.request_timeout_s)
    client: dict[str, Any] = {"timeout": timeout, "connect_timeout": min(timeout, _CONNECT)}
    scheme = urlsplit(settings.url).scheme
    owner = {"s3": "AWS", "s3a": "AWS", "gs": "GOOGLE"}.get(scheme, "AZURE")
    # Options given here take the place of those that the library finds in the environment.
    client["allow_http"] = os.environ.get(f"{owner}_ALLOW_HTTP", "").lower() in _YES
    if owner == "AWS":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT") or ""
        client["allow_http"] |= endpoint.lower().startswith("http://")
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            client["root_certificate"] = _certificates(bundle)
    retry: dict[str, Any] = {
        "max_retries": _NUM_RETRIES,
        "retry_timeout": timeout,
        "backoff": {
            "init_backoff": _FIRST_PAUSE,
            "max_backoff": timedelta(seconds=1),
            "base": 4,
        },
    }
    try:
        options: dict[str, Any] = {"client_options": client, "retry_config": retry}
        return obstore_stores.from_url(settings.url, **options)
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


class Requests:
    """Blocking requests under one prefix; thread-safe. Every method raises ``RequestError``.

    ``on_outcome`` is called after every request that reads: with None when it was answered, else
    with the error. Opening touches nothing but, for a file URL, the directory; it raises
    ``ConfigError`` for an invalid URL, or without obstore.
    """

    def __init__(
        self,
        settings: BucketSettings,
        *,
        on_outcome: Callable[[RequestError | None], None] = lambda _: None,
    ) -> None:
        self._store, self._is_remote, self._directory = _find_store(settings)
        self._timeout_s = settings.request_timeout_s
        self._on_outcome = on_outcome
        self._deletes_singly = False
        self._is_s3 = settings.url.startswith(("s3:", "s3a:"))
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._troubles: dict[str, str] = {}
        self.bytes_in = 0
        self.bytes_out = 0
        self.last_error = ""  # as a clause that names no secret and no endpoint

    @property
    def directory(self) -> Path | None:
        """Return where everything is, if the bucket is a directory."""
        return None if self._directory is None else self._directory.root

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

    def get(self, path: str, nbytes: int, *, into: memoryview | None = None) -> memoryview:
        """Return the first ``nbytes`` of an object, or all where it is shorter; of a directory in
        ``into``, where they fit."""
        if self._directory is not None:
            folder = self._directory
            room = memoryview(bytearray(nbytes)) if into is None else into[:nbytes]
            data = room[: self._read("get", lambda: folder.read(path, room))]
        else:
            store = self._store
            data = memoryview(
                self._read("get", lambda: obstore.get_range(store, path, start=0, end=nbytes))
            )
        with self._lock:
            self.bytes_in += len(data)
        return data

    def get_cached(self, path: str, buffers: Sequence[memoryview]) -> int:
        """Fill buffers with what memory holds of a directory's file; returns how many bytes, and 0
        for anything amiss. Never waits for storage."""
        if self._directory is None:
            return 0
        num_read = self._directory.read_cached(path, buffers)
        if num_read:
            with self._lock:
                self._requests["get"] += 1
                self.bytes_in += num_read
            self._on_outcome(None)
        return num_read

    def modified(self, path: str) -> float | None:
        """Return when an object was written, by the store's clock; None where it is missing."""
        try:
            if self._directory is not None:
                folder = self._directory
                return float(self._read("head", lambda: folder.modified(path)))
            store = self._store
            found = self._read("head", lambda: obstore.head(store, path))
        except RequestError as error:
            if error.failure is not Failure.NOT_FOUND:
                raise
            return None
        return float(found["last_modified"].timestamp())

    def listing(self, folder: str, *, after: str | None = None) -> Iterator[list[Listed]]:
        """Yield what is in a folder and below it, in parts and in the order of paths, from the path
        behind ``after`` on."""
        if self._directory is not None:
            files = self._directory.listing(folder, after)
            while chunk := self._read("list", lambda: next(files, None)):
                yield chunk
            return
        store = self._store
        # Made by the first request, whose errors are its own.
        stream: list[Any] = []

        def next_chunk() -> Any:
            if not stream:
                found = obstore.list(store, folder, offset=after, chunk_size=_AT_ONCE)
                stream.append(iter(found))
            return next(stream[0], None)

        while chunk := self._read("list", next_chunk):
            found = [
                Listed(m["path"], m["size"], m["last_modified"].timestamp(), m["e_tag"] or "")
                for m in chunk
            ]
            yield found if self._is_remote else sorted(found)
            if len(found) < _AT_ONCE and self._is_remote:
                return  # the last part said so: no further request

    def folders(self, folder: str) -> list[str]:
        """Return the paths of the folders in a folder."""
        if self._directory is not None:
            directory = self._directory
            return list(self._read("list", lambda: directory.folders(folder)))
        store = self._store
        found = self._read("list", lambda: obstore.list_with_delimiter(store, folder))
        return sorted(found["common_prefixes"])

    def put(self, path: str, data: bytes) -> None:
        """Write an object, whole or not at all; durable where the store is a directory."""
        if self._directory is not None:
            directory = self._directory
            self._write("put", lambda: directory.write(path, data))
        else:
            store, parts = self._store, len(data) > _MULTIPART_BYTES
            self._write(
                "put",
                lambda: obstore.put(store, path, data, use_multipart=parts, chunk_size=_PART_BYTES),
            )
        with self._lock:
            self.bytes_out += len(data)

    def replace(self, listed: Listed, data: bytes) -> bool:
        """Write an object in the place of one that was listed; returns whether that was still so.
        Where the store cannot tell, it goes in the place of any."""
        store, directory, path, outcome = self._store, self._directory, listed.path, [True]

        def put() -> None:
            if directory is not None:
                outcome[0] = directory.replace(listed, data)
                return
            try:
                obstore.put(store, path, data, mode={"e_tag": listed.tag}, use_multipart=False)
            except (obstore.exceptions.PreconditionError, obstore.exceptions.NotFoundError):
                outcome[0] = False
            except (obstore.exceptions.GenericError, obstore.exceptions.NotSupportedError):
                obstore.put(store, path, data)

        self._write("put", put)
        with self._lock:
            self.bytes_out += len(data)
        return outcome[0]

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; a missing one counts as deleted."""
        for start in range(0, len(paths), _AT_ONCE):
            chunk = list(paths[start : start + _AT_ONCE])
            if self._is_s3 and not self._deletes_singly:
                self._delete_in_bulk(chunk)
            elif self._is_s3:
                self._delete_singly(chunk)
            else:
                with ThreadPoolExecutor(_NUM_SINGLE) as pool:
                    list(pool.map(self._delete_one, chunk))

    def _delete_one(self, path: str) -> None:
        store, directory = self._store, self._directory
        remove = (
            (lambda: obstore.delete(store, path))
            if directory is None
            else (lambda: directory.remove(path))
        )
        self._write("delete", remove, missing_is_fine=True)

    def _delete_in_bulk(self, paths: list[str]) -> None:
        """Delete by one request, which not every S3 has (``POST ?delete``): where it fails and a
        single delete does not, all are single from then on."""
        store = self._store
        try:
            self._write("delete", lambda: obstore.delete(store, paths), missing_is_fine=True)
        except RequestError as error:
            try:
                self._delete_singly(paths[:1])
            except RequestError:
                raise error from None
            self._deletes_singly = True
            self._delete_singly(paths[1:])

    def _delete_singly(self, paths: list[str]) -> None:
        """The library deletes one object of an S3 by a bulk request too: it only signs."""
        store = self._store
        with ThreadPoolExecutor(_NUM_SINGLE) as pool:
            for start in range(0, len(paths), _NUM_SINGLE):
                urls = obstore.sign(
                    store, "DELETE", paths[start : start + _NUM_SINGLE], _SIGNED_FOR
                )
                list(pool.map(self._delete_signed, urls))

    def _delete_signed(self, url: str) -> None:
        def remove() -> None:
            context = ssl.create_default_context() if url.startswith("https:") else None
            if context is not None and (bundle := os.environ.get("AWS_CA_BUNDLE")):
                context.load_verify_locations(bundle)
            request = urllib.request.Request(url, method="DELETE")  # noqa: S310
            try:
                with urllib.request.urlopen(  # noqa: S310
                    request, timeout=self._timeout_s, context=context
                ):
                    return
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return
                raise OSError(f"status code: {error.code}") from None  # without the signed URL

        self._write("delete", remove, missing_is_fine=True)

    def _read(self, kind: str, request: Callable[[], Any]) -> Any:
        self._count(kind)
        try:
            found = request()
        except Exception as error:
            cause = explain(error, kind)
            answered = cause.failure in (Failure.NOT_FOUND, Failure.BAD_RANGE)
            if not answered:
                self.last_error = cause.clause
            self._on_outcome(None if answered else cause)
            raise cause from None
        self._on_outcome(None)
        return found

    def _write(
        self, kind: str, request: Callable[[], Any], *, missing_is_fine: bool = False
    ) -> None:
        self._count(kind)
        try:
            request()
        except Exception as error:
            cause = explain(error, kind)
            if not (missing_is_fine and cause.failure is Failure.NOT_FOUND):
                with self._lock:
                    self.last_error = self._troubles[kind] = cause.clause
                raise cause from None
        with self._lock:
            self._troubles.pop(kind, None)

    def _count(self, kind: str) -> None:
        with self._lock:
            self._requests[kind] += 1
