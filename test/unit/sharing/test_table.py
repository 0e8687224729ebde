"""The table of pages and their holders: nothing is lost, found twice, or held by nobody."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_tiered.sharing.table import PageTable, choose_slots


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


def bits_of(*holders: set[int], words: int = 1) -> np.ndarray:
    """``[words, pages]`` from the slots that hold each page."""
    values = [sum(1 << slot for slot in page) for page in holders]
    return np.array(
        [[value >> 64 * word & (1 << 64) - 1 for value in values] for word in range(words)],
        np.uint64,
    )


def chosen(bits: np.ndarray, salt: int = 1) -> list[int]:
    return choose_slots(bits, np.arange(1, bits.shape[1] + 1, dtype=np.uint64), salt).tolist()


def test_pages_that_lie_about_everywhere_are_all_found() -> None:
    source = np.random.default_rng(0)
    holders = [set(source.integers(0, 150, 2).tolist()) for _ in range(200)]
    for page, slot in zip(holders, chosen(bits_of(*holders, words=3)), strict=True):
        assert slot in page
