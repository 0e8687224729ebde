"""Tiered KV cache for the SGLang runtime. Importing this package imports nothing heavy; ``Engine``,
which is SGLang's with the tiers, is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_tiered.integration.engine import Engine

__version__ = "0.1.0"

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang_tiered.integration.engine import Engine

    return Engine
