"""Which server holds which page, by way of a Redis that all of them reach; see ../README.md."""

from __future__ import annotations
