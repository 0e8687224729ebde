"""Each place of ``same_turn`` is what the answer says, or there is no figure."""

from __future__ import annotations

import pytest

from kit.samples import sample
from serving_bench.client import Sample
from serving_bench.same_turn import COMPUTED, found_in
from serving_bench.setting import PAGE_SIZE

HISTORY = 2 * PAGE_SIZE


def asked(label: str = "a", ttft_s: float = 1.0, output: int = 1, **cached: int) -> Sample:
    return sample(label, ttft_s=ttft_s, reusable=HISTORY, output=(output,), **cached)


@pytest.mark.parametrize(
    ("cached", "loaded", "place"),
    [
        ({}, {}, COMPUTED),
        ({"device": HISTORY}, {}, "device"),
        ({"host": HISTORY}, {"nvme": 1}, "host"),
        ({"storage": HISTORY}, {"nvme": 2, "peer": 0}, "nvme"),
        ({"storage": HISTORY}, {"nvme": 1, "peer": 2}, "peer"),  # and a probe of the disk
        ({"storage": HISTORY}, {"bucket": 2}, "bucket"),
        ({"storage": HISTORY}, {"nvme": 2, "peer": 2}, None),
        ({"storage": HISTORY}, {"nvme": 1, "peer": 1}, None),
        ({"storage": PAGE_SIZE}, {"nvme": 2}, None),
        ({"host": PAGE_SIZE, "storage": PAGE_SIZE}, {"nvme": 1}, None),
    ],
)
def test_a_place_is_one_that_served_all(
    cached: dict[str, int], loaded: dict[str, int], place: str | None
) -> None:
    assert found_in(asked(**cached), loaded, HISTORY) == place
