"""The table of pages and their holders: nothing is lost, found twice, or held by nobody."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_tiered.sharing.table import PageTable


def pages_of(seed: int, count: int) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(1, 1 << 64, count, dtype=np.uint64))


def test_pages_of_one_full_bucket_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PageTable(3000)
    monkeypatch.setattr(table, "_bucket", lambda pages: np.full(len(pages), 300, np.int64))
    here = pages_of(3, 400)
    table.set_bit(table.add(here[:200]), 0)
    table.set_bit(table.add(here[200:]), 0)
    assert (table.find(here) >= 0).all()
    assert (table.find(pages_of(4, 50)) == -1).all()
    table.check_integrity(len(here))
