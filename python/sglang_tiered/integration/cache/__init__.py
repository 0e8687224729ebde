"""SGLang's radix cache over the tiers: what is loaded, spilled and kept, and when."""

from __future__ import annotations
