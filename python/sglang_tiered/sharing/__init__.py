"""Pages that other servers hold: who holds which (``locality``), and a tier made of them."""

from __future__ import annotations
