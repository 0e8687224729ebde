"""How a load is cut into reads."""

from __future__ import annotations

import pytest

from sglang_tiered.storage.region.pending import Wanted, plan_spans
from sglang_tiered.storage.region.regions import Region

REGIONS = [Region(number, -1, 1 << 30, b"n" * 16) for number in range(2)]
KIB = 1 << 10
PLANS = {  # region, offset and length of each page, and which of them are read together
    "adjacent": ([(0, 8192, 5000), (0, 16_384, 4096), (0, 20_480, 1)], [[0, 1, 2]]),
    "gap, other region, backwards": (
        [(0, 8192, 4096), (0, 16_384, 4096), (1, 20_480, 4096), (1, 8192, 4096)],
        [[0], [1], [2], [3]],
    ),
    "short, half a mebibyte at least": (
        [(0, 8192 + 256 * KIB * i, 256 * KIB) for i in range(9)],
        [[0, 1], [2, 3], [4, 5], [6, 7], [8]],
    ),
    "an eighth each": (
        [(0, 8192 + 256 * KIB * i, 256 * KIB) for i in range(32)],
        [[4 * i + j for j in range(4)] for i in range(8)],
    ),
    "long, four mebibytes at most": (
        [(0, 8192 + 1024 * KIB * i, 1024 * KIB) for i in range(64)],
        [[4 * i + j for j in range(4)] for i in range(16)],
    ),
    "larger than a read": ([(0, 8192 + 4096 * KIB * i, 4096 * KIB) for i in range(2)], [[0], [1]]),
}


@pytest.mark.parametrize("name", PLANS)
def test_adjacent_pages_are_read_together_yet_spread(name: str) -> None:
    pages, expected = PLANS[name]
    wanted = [
        Wanted(i, bytes([i]) * 32, REGIONS[region], offset, length, 0, (memoryview(b""),))
        for i, (region, offset, length) in enumerate(pages)
    ]
    assert [[item.position for item in span] for span in plan_spans(wanted)] == expected
