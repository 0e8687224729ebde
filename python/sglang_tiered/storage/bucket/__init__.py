"""A bucket: one object a page, in a bucket or a shared directory. ``README.md`` has the format, the
flow and what happens when something fails."""

from __future__ import annotations

from sglang_tiered.storage.bucket.engine import BucketEngine

__all__ = ["BucketEngine"]
