"""The page index against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_tiered.storage.region.index import PageIndex, key_words

NUM_SLOTS = 5
# Few enough that they meet again, more than the smallest table holds.
KEYS = [i.to_bytes(32, "little") for i in range(1500)]
spans = st.tuples(st.integers(0, len(KEYS) - 1), st.integers(1, 700))


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PageIndex()
        self.model: dict[bytes, tuple[int, int, int, int]] = {}
        self.version = 0

    @rule(span=spans, slot=st.integers(0, NUM_SLOTS - 1))
    def put(self, span: tuple[int, int], slot: int) -> None:
        keys = KEYS[span[0] : span[0] + span[1]]
        self.version += 1
        offsets = 4096 * np.arange(1, len(keys) + 1)
        lengths = np.full(len(keys), self.version, np.uint32)
        checksums = np.arange(len(keys), dtype=np.uint64) + np.uint64(2**63)
        self.index.put(key_words(keys), slot, offsets, lengths, checksums)
        places = zip(offsets.tolist(), lengths.tolist(), checksums.tolist(), strict=True)
        for key, (offset, length, checksum) in zip(keys, places, strict=True):
            self.model[key] = (slot, offset, length, checksum)

    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def drop_region(self, slot: int) -> None:
        gone = [key for key, place in self.model.items() if place[0] == slot]
        assert self.index.drop_region(slot) == len(gone)
        for key in gone:
            del self.model[key]

    @rule(number=st.integers(0, len(KEYS) - 1))
    def drop(self, number: int) -> None:
        key = KEYS[number]
        if key in self.model:
            slot, offset, _, _ = self.model.pop(key)
            self.index.drop(key, slot, offset)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.model.clear()

    @rule(span=spans)
    def leading(self, span: tuple[int, int]) -> None:
        keys = KEYS[span[0] : span[0] + span[1]]
        expected = [*(key in self.model for key in keys), False].index(False)
        assert self.index.num_leading(keys) == expected

    @invariant()
    def agrees(self) -> None:
        self.index.check_integrity(dict.fromkeys(range(NUM_SLOTS), 1 << 30))
        rows = self.index.find(key_words(KEYS))
        held = rows >= 0
        assert [key for key, found in zip(KEYS, held, strict=True) if found] == [
            key for key in KEYS if key in self.model
        ]
        places = self.index.places(rows[held])
        assert list(zip(*places, strict=True)) == [
            self.model[key] for key in KEYS if key in self.model
        ]


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, derandomize=True
)
