"""Memory is bounded by the tiers, not by the trace."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from kit.talks import make_request
from sglang_tiered_lab.trace.inputs import Input
from sglang_tiered_lab.trace.mooncake import encode
from sglang_tiered_lab.trace.replay.runner import Replay, replay
from sglang_tiered_lab.trace.replay.sizes import TierSizes
from sglang_tiered_lab.trace.replay.stream import TraceStream
from sglang_tiered_lab.trace.replay.timing import PROFILES


@pytest.mark.parametrize("policy", ["tiered", "belady"])
def test_four_times_the_requests_take_no_more_memory(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [
        make_request(
            (0, *range(10 * i, 10 * i + 5)), block_tokens=512, output_length=1, arrival_s=0.1 * i
        )
        for i in range(1, 401)
    ]
    path.write_bytes(b"".join(encode(one) + b"\n" for one in requests))
    hardware = PROFILES["8b-h100"]
    nvme_tokens = 512 * 3000
    sizes = TierSizes(
        device_tokens=512 * 200,
        host_tokens=512 * 500,
        nvme_tokens=nvme_tokens,
        nvme_bytes=nvme_tokens * hardware.kv_bytes_per_token,
        region_bytes=1 << 28,
    )
    peaks = []
    for copies in (3, 12):
        stream = TraceStream(Input(path), replicate=copies, spread_s=3000.0 * copies, stretch=30)
        tracemalloc.start()
        try:
            (run,) = replay(Replay(stream, hardware, [policy], [sizes]))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert run.totals.num_requests == 400 * copies
    # The arrays of one window of requests, 200,000 at most, are in both.
    assert peaks[1] < 1.5 * peaks[0] + (4 << 20)
