"""One store for several processes of a machine whose pages are the same: see ``README.md``."""

from __future__ import annotations

from sglang_tiered.storage.lending.borrower import BorrowedEngine
from sglang_tiered.storage.lending.lender import PageLender

__all__ = ["BorrowedEngine", "PageLender"]
