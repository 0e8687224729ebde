"""The objects of a bucket (S3, GCS, Azure), by ``obstore``. It retries, with pauses, within the
timeout of one request; it is configured here alone.

Credentials, region and endpoint come from the environment as S3's own tools read it (``AWS_*``;
Google's and Azure's likewise). TLS is the rule: plain HTTP is spoken only where the endpoint says
``http://`` or ``AWS_ALLOW_HTTP`` (``GOOGLE_``, ``AZURE_``) is set. Nothing of them is kept, shown
or logged here.
"""

from __future__ import annotations

import os
import ssl
import threading
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sglang_tiered.errors import ConfigError
from sglang_tiered.extras import require
from sglang_tiered.storage.bucket.directory import LISTED_AT_ONCE, Listed

try:
    import obstore
    from obstore import store as obstore_stores
except ImportError:  # the tier is optional: only opening it asks for the library
    obstore = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["REMOTE", "Remote", "require_library"]

REMOTE = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
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


def require_library() -> None:
    """Raise ``ConfigError`` without obstore."""
    require("the object tier", "obstore")
    if obstore is None:
        raise ConfigError("obstore is installed but cannot be imported; install it anew.")


class Remote:
    """The objects under a URL. Thread-safe. Opening touches nothing; it raises ``ConfigError`` for
    what in the environment is invalid. Everything else raises the library's own errors."""

    def __init__(self, url: str, timeout_s: float) -> None:
        scheme = urlsplit(url).scheme
        self._timeout_s = timeout_s
        self.deletes_in_bulk = _OWNERS.get(scheme) == "AWS"
        self._store: Any
        if scheme == "memory":
            with _memory_lock:
                self._store = _memory_stores.setdefault(url, obstore_stores.MemoryStore())
        else:
            self._store = _open(url, _OWNERS.get(scheme, "AZURE"), timeout_s)

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
            error.close()
            if error.code != 404:
                raise OSError(f"status code: {error.code}") from None  # without the signed URL


def _open(url: str, owner: str, timeout_s: float) -> Any:
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
