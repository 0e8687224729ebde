"""The comparison of the simulator with a live server pairs what belongs together."""

from __future__ import annotations

import pytest

from live_bench.asking import Measured
from live_bench.modelled import compare, kind_of
from serving_bench.client import Sample
from serving_bench.setting import Geometry
from sglang_tiered_lab.trace.request import TraceRequest

MEASURED = Measured(
    prefill=(0.03, 4e-4, 0.0, 0.0),
    nvme=(1e-3, 1e-9),
    step_s=(0.01, 0.0),
    outside_s=0.02,
    token_bytes=8192,
    chunk_tokens=4096,
)


def sample(started_s: float, num_prompt: int, **cached: int) -> Sample:
    tiers = {"device": 0, "host": 0, "storage": 0, **cached}
    return Sample("", started_s, 0.5, (0.01,), 0.51, num_prompt, 0, (), tiers)


def test_requests_are_modelled_as_they_were_sent() -> None:
    """A turn may be sent after one that follows it in the trace."""
    trace = [
        TraceRequest(
            arrival_s=0.0, input_length=200, output_length=2, block_ids=ids, block_tokens=64
        )
        for ids in ((1, 2, 3, 4), (1, 2, 5, 6))
    ]
    kind = kind_of(MEASURED, Geometry(device_tokens=4096, host_ratio=2, nvme_bytes=1 << 30), 8192)
    samples = [sample(109.0, 200, device=128), sample(100.0, 200)]
    found = compare(kind, trace, samples, num_output=8)
    assert found["order"] == [1, 0]
    assert found["modelled_ttft_s"] == pytest.approx([0.13, 0.13 - 128 * 4e-4])
    assert found["live_hit_rate"] == {"device": 128 / 400, "host": 0, "nvme": 0}
    assert found["modelled_hit_rate"] == found["live_hit_rate"]
    assert found["live"]["mean"] == pytest.approx(0.5)
