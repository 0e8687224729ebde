"""What a bucket is opened with."""

from __future__ import annotations

import msgspec

from sglang_tiered.errors import ConfigError

__all__ = ["BucketSettings"]


class BucketSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a bucket; values that cannot work raise ``ConfigError`` with one sentence.
    Credentials are not among them: those come from the environment."""

    url: str
    """``s3://bucket/prefix``, ``gs://``, ``az://``, the file URL of a directory, or
    ``memory://name``."""

    capacity_bytes: int | None = None
    """Of the namespace in the bucket. The collector deletes the oldest beyond it; an engine
    forgets them."""

    ttl_s: float | None = None
    """Pages older than this are misses, and deleted by the collector."""

    refresh_s: float = 5.0
    """How often other servers' pages are looked for."""

    max_pages: int = 2_000_000
    """Bound of the index in memory; the oldest pages are forgotten first."""

    max_tenant_bytes: int | None = None
    """What one tenant may have; its own oldest pages are forgotten for it."""

    num_connections: int = 8
    """Requests under way that load pages; half as many store them."""

    request_timeout_s: float = 10.0
    """Of one request, its body included; its retries end after that time too."""

    writes_per_day: int | None = None
    """Bytes that this engine may write in 24 hours."""

    requests_per_day: int | None = None
    """Pages that this engine may put in 24 hours, each a request."""

    staging_bytes: int = 256 << 20
    """Pages that wait for their upload in their owner's memory; stores beyond it are rejected."""

    @property
    def max_page_bytes(self) -> int:
        """Return the longest page that can be kept."""
        return min(self.staging_bytes, self.capacity_bytes or self.staging_bytes)

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, (int, float)) and not value > 0:
                raise ConfigError(f"{name} of the object tier is {value}, not above 0")
