"""What an object tier is opened with."""

from __future__ import annotations

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.object.format import MAX_OBJECT_BYTES, NO_CODEC

__all__ = ["MAX_CODEC_NAME_BYTES", "OBJECT_BYTES", "ObjectSettings"]

OBJECT_BYTES = 32 << 20
MAX_CODEC_NAME_BYTES = 16


class ObjectSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an object tier; values that cannot work raise ``ConfigError`` with one sentence.
    Credentials are not among them: those come from the environment."""

    url: str
    """``s3://bucket/prefix``, ``gs://``, ``az://``, the file URL of a directory, or
    ``memory://name``."""

    object_bytes: int = OBJECT_BYTES
    """Payload of a full object. A longer page has one to itself."""

    linger_s: float = 5.0
    """An object that is not full is closed after this."""

    capacity_bytes: int | None = None
    """Of the namespace in the bucket. The collector deletes what is beyond it; an engine drops
    the oldest objects beyond it."""

    ttl_s: float | None = None
    """Objects older than this are misses, and deleted by the collector."""

    refresh_s: float = 5.0
    """How often other writers' manifests are looked for."""

    max_pages: int = 4_000_000
    """Bound of the index in memory; the oldest objects are forgotten first."""

    max_tenant_bytes: int | None = None
    """What one tenant may have; its own oldest objects are forgotten for it."""

    num_connections: int = 8
    """Requests under way that read; a quarter as many write."""

    request_timeout_s: float = 10.0
    """Of one request, its body included."""

    writes_per_day: int | None = None
    """Bytes that this engine may write in 24 hours."""

    requests_per_day: int | None = None
    """Writing requests (put and delete) that this engine may make in 24 hours."""

    codec: str = NO_CODEC
    """A name known to ``codecs``."""

    staging_bytes: int = 256 << 20
    """Memory for objects that are being filled and uploaded; stores beyond it are rejected."""

    @property
    def max_page_bytes(self) -> int:
        """Return the longest page that can be staged and kept."""
        return min(MAX_OBJECT_BYTES, self.staging_bytes, self.capacity_bytes or MAX_OBJECT_BYTES)

    def __post_init__(self) -> None:
        positive = (
            "object_bytes",
            "max_pages",
            "num_connections",
            "staging_bytes",
            "refresh_s",
            "request_timeout_s",
            *(
                name
                for name in (
                    "capacity_bytes",
                    "ttl_s",
                    "max_tenant_bytes",
                    "writes_per_day",
                    "requests_per_day",
                )
                if getattr(self, name) is not None
            ),
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{name} of the object tier is {getattr(self, name)}, not above 0"
                )
        if self.object_bytes > MAX_OBJECT_BYTES:
            raise ConfigError(
                f"object_bytes is {self.object_bytes}, must be at most {MAX_OBJECT_BYTES}"
            )
        if self.staging_bytes < self.object_bytes:
            raise ConfigError(
                f"staging_bytes is {self.staging_bytes}, must hold one object of "
                f"{self.object_bytes} bytes"
            )
        if not self.linger_s >= 0:
            raise ConfigError(f"linger_s of the object tier is {self.linger_s}, below 0")
        if not self.codec.isascii() or not 0 < len(self.codec) <= MAX_CODEC_NAME_BYTES:
            raise ConfigError(f"{self.codec!r} cannot be the name of a codec")
