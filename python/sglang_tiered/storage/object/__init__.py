"""The object tier: pages in immutable objects of a bucket or a shared directory. ``README.md``
has the format, the flow and what happens when something fails."""

from __future__ import annotations

from sglang_tiered.storage.object.engine import ObjectEngine
from sglang_tiered.storage.object.settings import ObjectSettings

__all__ = ["ObjectEngine", "ObjectSettings"]
