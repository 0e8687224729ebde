"""``sglang-tiered store``: look into a tier directory, check it, and give space back."""

from __future__ import annotations
