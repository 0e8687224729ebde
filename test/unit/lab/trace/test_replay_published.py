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
