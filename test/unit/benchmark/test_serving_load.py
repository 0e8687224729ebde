"""What scenarios of the serving benchmark decide before anything is divided."""

from __future__ import annotations

import pytest

from kit.samples import sample
from serving_bench.balanced import ideal_s, paced_bytes_per_s, prefill_s_per_token
from serving_bench.paced_disk import Read, achieved_bytes_per_s
from serving_bench.regret import regrets
from serving_bench.same_turn import COMPUTED, found_in
from serving_bench.setting import PAGE_SIZE
from serving_bench.systems import ALWAYS
from serving_bench.users import BUSY, think_s


def test_the_ideal_shares_work_between_both_ends() -> None:
    assert ideal_s(prefill_s=1.0, load_s=1.0, new_s=0.1) == pytest.approx(0.6)
    # A disk that takes forever leaves the prefill, one that takes no time leaves the new tokens.
    assert ideal_s(1.0, 1e9, 0.1) == pytest.approx(1.1)
    assert ideal_s(1.0, 1e-9, 0.1) == pytest.approx(0.1)


def test_the_prefill_leaves_new_tokens_out() -> None:
    full = [sample(ttft_s=ttft_s, reusable=150) for ttft_s in (1.5, 9.0, 1.78)]
    per_token_s = prefill_s_per_token(full, [sample(ttft_s=0.5)] * 3)
    assert per_token_s == pytest.approx(1.28 / 128)
    speed = paced_bytes_per_s(0.5, prefill_s=per_token_s, token_bytes=8000)
    assert 8000 / speed == pytest.approx(0.5 * per_token_s), "loads take half of the prefill"


def test_reads_side_by_side_share_one_disk() -> None:
    # Two at once and one later: 3 units in the 2 s in which anything was read.
    reads = [Read(5.0, 6.0, 1), Read(0.0, 1.0, 1), Read(0.5, 1.0, 1)]
    assert achieved_bytes_per_s(reads) == 1.5
    assert achieved_bytes_per_s([]) == 0.0


def test_thinking_times_keep_a_server_busy() -> None:
    # Five users of a server that takes 0.1 s for each request, one after the other.
    taken = [sample(started_s=i / 10, latency_s=0.1) for i in range(50)]
    thought_s = think_s(taken, 5)
    assert 5 * 0.1 / (thought_s + 0.1) == pytest.approx(BUSY)
    queued = [sample(started_s=i / 10, latency_s=9.0) for i in range(50)]
    assert think_s(queued, 1) == 0.0


def test_regret_is_over_the_better_of_both() -> None:
    taken = {
        "tiered": [sample(ttft_s=1.1), sample(ttft_s=0.9)],
        ALWAYS: [sample(ttft_s=1.0), sample(ttft_s=3.0)],
        "stock": [sample(ttft_s=2.0), sample(ttft_s=0.9)],
    }
    assert regrets(taken) == pytest.approx([1.1, 1.0])


HISTORY = 2 * PAGE_SIZE


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
    asked = sample(reusable=HISTORY, output=(1,), **cached)
    assert found_in(asked, loaded, HISTORY) == place
