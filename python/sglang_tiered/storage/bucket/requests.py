"""Requests to a bucket: what they took, and what went wrong. ``connect`` opens what they go to; the
library retries, with pauses, within the timeout of one request.

The text of a library's error names the endpoint, and a refusal repeats the key id: it is read here
to tell causes apart, and goes no further.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.bucket.connect import find_store, obstore
from sglang_tiered.storage.bucket.directory import Directory, Listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sglang_tiered.storage.bucket.settings import BucketSettings

__all__ = ["Failure", "RequestError", "Requests", "explain"]

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
        found = find_store(settings)
        self._directory = None if found.directory is None else Directory(found.directory)
        self._store = found.store
        self._timeout_s = settings.request_timeout_s
        self._on_outcome = on_outcome
        self._is_remote = found.is_remote
        self._deletes_singly = False
        self._is_s3 = found.is_s3
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
