"""Tiered KV cache for the SGLang runtime. Importing this package imports nothing heavy."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
