"""SGLang's storage seam (``HiCacheStorage``) over the tiers."""

from __future__ import annotations
