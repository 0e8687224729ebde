"""Stores by their URL, the only place that configures obstore.

Credentials, region and endpoint come from the environment as S3's own tools read it (``AWS_*``;
Google's and Azure's likewise). TLS is the rule: plain HTTP is spoken only where the endpoint says
``http://`` or ``AWS_ALLOW_HTTP`` (``GOOGLE_``, ``AZURE_``) is set. Nothing of them is kept, shown
or logged here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from sglang_tiered.errors import ConfigError
from sglang_tiered.extras import require

try:
    import obstore
    from obstore import store as obstore_stores
except ImportError:  # the tier is optional: only opening it asks for the library
    obstore = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from sglang_tiered.storage.bucket.settings import BucketSettings

__all__ = ["FoundStore", "find_store", "obstore"]

_NUM_RETRIES = 2
_FIRST_PAUSE = timedelta(seconds=0.05)

_REMOTE = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
_CONNECT = timedelta(seconds=5)
_YES = ("1", "true", "yes")

_memory_stores: dict[str, Any] = {}  # by URL: engines of one process share them
_memory_lock = threading.Lock()


class FoundStore(NamedTuple):
    """What a URL leads to: a store of the library, or a directory."""

    store: Any
    is_remote: bool
    is_s3: bool
    directory: Path | None


def find_store(settings: BucketSettings) -> FoundStore:
    """Find a URL's store, touching nothing. Raises ``ConfigError`` if it is invalid or obstore
    missing."""
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
    return FoundStore(store, parts.scheme in _REMOTE, parts.scheme in ("s3", "s3a"), directory)


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
