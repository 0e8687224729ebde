"""Attention and copy kernels beside their plain references. Imports torch and triton only."""

from __future__ import annotations
