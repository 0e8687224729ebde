"""What is loaded before a request asks for it, and given to the tree before one ends."""

from __future__ import annotations
