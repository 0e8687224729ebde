"""Turns flags into configuration before a server starts."""

from __future__ import annotations
