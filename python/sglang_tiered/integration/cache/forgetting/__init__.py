"""The radix cache with single pages in it that were forgotten."""

from __future__ import annotations
