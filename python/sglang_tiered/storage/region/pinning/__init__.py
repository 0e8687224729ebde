"""Pins: named sets of pages that reclaim keeps."""

from __future__ import annotations
