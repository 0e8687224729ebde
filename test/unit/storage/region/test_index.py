"""The page index: counts follow every change, and keys that collide are kept apart."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_tiered.storage.region import index as index_module
from sglang_tiered.storage.region.index import PageIndex, key_words

KEYS = [bytes([i]) * 32 for i in range(6)]
SLOTS = dict.fromkeys(range(8), 1 << 30)


def put(
    index: PageIndex, keys: list[bytes], slot: int, offset: int = 8192, length: int = 10
) -> None:
    count = len(keys)
    index.put(
        key_words(keys),
        slot,
        offset + 4096 * np.arange(count),
        np.full(count, length, np.uint32),
        np.arange(count, dtype=np.uint64),
    )


def held(index: PageIndex) -> list[bool]:
    return [key in index for key in KEYS]


def test_drop_only_while_the_key_points_there() -> None:
    index = PageIndex()
    put(index, KEYS[:1], 0)
    put(index, KEYS[:1], 1)
    index.drop(KEYS[0], 0, 8192)
    index.drop(KEYS[0], 1, 4096)
    index.drop(KEYS[1], 1, 8192)
    assert KEYS[0] in index
    index.drop(KEYS[0], 1, 8192)
    assert KEYS[0] not in index
    index.check_integrity(SLOTS)


def test_rows_of_dropped_pages_are_used_again() -> None:
    index = PageIndex()
    for round_number in range(300):
        put(index, KEYS, round_number % 8)
        index.drop_region(round_number % 8)
    index.check_integrity(SLOTS)
    assert index._num_rows <= len(KEYS)
    assert len(index._table) == index_module._MIN_TABLE


def test_colliding_keys_do_not_hide_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "hash_words", lambda words: np.full(len(words), 5, np.uint64))
    index = PageIndex()
    put(index, KEYS[:4], 0)
    put(index, KEYS[4:], 1)
    assert held(index) == [True] * 6
    index.drop(KEYS[1], 0, 8192 + 4096)
    assert held(index) == [True, False, True, True, True, True]
    put(index, KEYS[1:2], 2)
    assert held(index) == [True] * 6
    index.check_integrity(SLOTS)


def test_hot_pages_are_the_most_loaded_that_fit() -> None:
    index = PageIndex()
    put(index, KEYS, 0, length=4096)
    rows = index.find(key_words(KEYS))
    for loaded in ([1, 3, 5], [3, 5], [5]):
        index.hit(rows[loaded])
    assert index.keys(index.hot_rows(0, 1 << 20)) == [KEYS[1], KEYS[3], KEYS[5]]
    assert index.keys(index.hot_rows(0, 2 * 4096)) == [KEYS[3], KEYS[5]]
    assert index.keys(index.hot_rows(0, 4095)) == []
    put(index, KEYS[5:], 0, offset=1 << 20, length=4096)
    assert index.keys(index.hot_rows(0, 1 << 20)) == [KEYS[1], KEYS[3]], "new pages are not hot"


def test_a_hit_count_does_not_wrap() -> None:
    index = PageIndex()
    put(index, KEYS[:1], 0)
    for _ in range(300):
        index.hit(index.find(key_words(KEYS[:1])))
    assert len(index.hot_rows(0, 1 << 20)) == 1


def test_wrong_live_count_is_found() -> None:
    index = PageIndex()
    put(index, KEYS[:1], 0)
    index._live[0] = 2
    with pytest.raises(AssertionError, match="1 rows, counted 2"):
        index.check_integrity(SLOTS)


def test_pages_of_several_regions_come_together() -> None:
    index = PageIndex()
    put(index, KEYS[:2], 5)
    keys, slots = [*KEYS[:4], KEYS[1], KEYS[4]], np.array([0, 0, 3, 3, 70, 70], np.int32)
    index.put(
        key_words(keys),
        slots,
        8192 + 4096 * np.arange(6),
        np.full(6, 10, np.uint32),
        np.arange(6, dtype=np.uint64),
    )
    assert [index.num_live(slot) for slot in (0, 3, 5, 70)] == [1, 2, 0, 2]
    assert index.places(index.find(key_words(KEYS[:2]))).slots == [0, 70]
    index.check_integrity({**SLOTS, 70: 1 << 30})
    assert index.drop_region(70) == 2
    assert held(index) == [True, False, True, True, False, False]
    index.check_integrity(SLOTS)
