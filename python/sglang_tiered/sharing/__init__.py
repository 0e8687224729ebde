"""Pages that other servers hold: who holds which, what all have erased, and a tier made of them."""

from __future__ import annotations
