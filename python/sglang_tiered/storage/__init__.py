"""Tier engines: bytes in, bytes out. They know no tokens, no tensors and no SGLang."""

from __future__ import annotations
