"""Pins in a bucket: pages that no server's cap, time to live or collector takes."""

from __future__ import annotations
