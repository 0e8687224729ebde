"""The comparison of the simulator with a live server pairs what belongs together."""

from __future__ import annotations

import pytest

from kit.samples import sample
from kit.talks import make_request
from live_bench.asking import Measured
from live_bench.modelled import compare, kind_of
from serving_bench.setting import Geometry

MEASURED = Measured(
    prefill=(0.03, 4e-4, 0.0, 0.0),
    nvme=(1e-3, 1e-9),
    step_s=(0.01, 0.0),
    outside_s=0.02,
    token_bytes=8192,
    chunk_tokens=4096,
)


def test_requests_are_modelled_as_they_were_sent() -> None:
    """A turn may be sent after one that follows it in the trace."""
    trace = [
        make_request(ids, block_tokens=64, missing=56, output_length=2)
        for ids in ((1, 2, 3, 4), (1, 2, 5, 6))
    ]
    kind = kind_of(MEASURED, Geometry(device_tokens=4096, host_ratio=2, nvme_bytes=1 << 30), 8192)
    samples = [
        sample(started_s=at, ttft_s=0.5, output=(), **cached)
        for at, cached in ((109.0, {"device": 128}), (100.0, {}))
    ]
    found = compare(kind, trace, samples, num_output=8)
    assert found["order"] == [1, 0]
    assert found["modelled_ttft_s"] == pytest.approx([0.13, 0.13 - 128 * 4e-4])
    assert found["live_hit_rate"] == {"device": 128 / 400, "host": 0, "nvme": 0}
    assert found["modelled_hit_rate"] == found["live_hit_rate"]
    assert found["live"]["mean"] == pytest.approx(0.5)
