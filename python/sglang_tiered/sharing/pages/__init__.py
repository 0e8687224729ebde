"""Pages by name, from the servers that hold them to those that ask."""

from __future__ import annotations
