"""Flags to configuration, before a server starts."""

from __future__ import annotations
