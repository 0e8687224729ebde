"""On the published traces the replay gives the published and independently computed figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_tiered_lab.trace.inputs import Input
from sglang_tiered_lab.trace.replay.runner import Replay, replay
from sglang_tiered_lab.trace.replay.sizes import TierSizes
from sglang_tiered_lab.trace.replay.stream import TraceStream
from sglang_tiered_lab.trace.replay.timing import PROFILES


@pytest.mark.parametrize(
    ("name", "ideal", "curve"),
    [("conversation", 36.6, {1.5: 6.5, 15: 32.6}), ("synthetic", 64.0, {1.5: 18.8, 15: 62.4})],
)
def test_a_single_cache_hits_what_was_published(
    published: Callable[[str], Path], name: str, ideal: float, curve: dict[float, float]
) -> None:
    stream = TraceStream(Input(published(name)))
    none = dict.fromkeys(("host_tokens", "nvme_tokens", "nvme_bytes", "region_bytes"), 0)
    sizes = [TierSizes(device_tokens=int(million * 1e6), **none) for million in curve]
    runs = replay(Replay(stream, PROFILES["8b-h100"], ("lru", "belady", "infinite"), sizes))
    rates = {(run.policy, run.sizes.device_tokens): 100 * run.totals.hit_rate for run in runs}
    for million, wanted in curve.items():
        tokens = int(million * 1e6)
        assert rates["lru", tokens] == pytest.approx(wanted, abs=0.1)
        assert rates["infinite", tokens] == pytest.approx(ideal, abs=0.05)
        assert rates["lru", tokens] < rates["belady", tokens] <= rates["infinite", tokens]


def test_replay_is_the_same_every_time(published: Callable[[str], Path]) -> None:
    stream = TraceStream(Input(published("conversation"), limit=1500), stretch=4)
    hardware = PROFILES["8b-h100"]
    sizes = TierSizes(
        device_tokens=100_000,
        host_tokens=300_000,
        nvme_tokens=5_000_000,
        nvme_bytes=5_000_000 * hardware.kv_bytes_per_token,
        region_bytes=256 << 20,
    )
    plan = Replay(stream, hardware, ("hicache", "tiered"), [sizes])
    first, second = ([run.totals for run in replay(plan)] for _ in range(2))
    assert [totals.ttft.summary() for totals in first] == [t.ttft.summary() for t in second]
    assert [totals.units_hit for totals in first] == [totals.units_hit for totals in second]
    assert all(totals.units_hit["nvme"] for totals in first)
