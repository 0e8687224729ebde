"""The POD benchmark: nothing is compared that differs, and figures say what they are said to."""

from __future__ import annotations

import json

import pytest
import torch

import bench_pod_attention
from pod_bench.batch import Batch, make_batch
from pod_bench.contenders import own_contenders
from pod_bench.gate import DifferentResultsError, check_against, check_against_reference
from pod_bench.mixes import GATE_MIXES, MIXES, Ceilings, Heads
from pod_bench.report import MixResult, Report

HEADS = bench_pod_attention.CPU_HEADS
CPU = torch.device("cpu")
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def batch_of(page_size: int) -> Batch:
    return make_batch(GATE_MIXES[0], HEADS, page_size=page_size, dtype=torch.float16, device=CPU)


@WITHOUT_GPU
def test_everybody_who_runs_here_gives_the_references_results(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench_pod_attention.main(["--check"]) == 0
    assert "All results are equal." in capsys.readouterr().out


@pytest.mark.parametrize("row", ["prefill", "decode"])
def test_one_wrong_key_stops_the_run(row: str) -> None:
    batch = batch_of(64)
    first, decoding = own_contenders(batch, None)[0], batch.mix.prompts
    check_against_reference(batch, first.name, first.run())
    expected = first.run().clone()
    slot = batch.slots(0 if row == "prefill" else decoding, 0, 1)
    batch.v_cache[slot] *= -1
    batch.v_cache[slot] += 3
    with pytest.raises(DifferentResultsError, match="own_serial differs on 61 of 183 \\+ 3 x 45"):
        check_against(batch, first.name, first.run(), expected)


def test_the_roofline_is_that_of_the_layer() -> None:
    heads, mix = Heads(), MIXES[5]  # 2048 of 8k beside 64 decodes of 8k
    assert mix.prefill_flops(heads) == pytest.approx(241e9, rel=0.01)
    kv_bytes = 4096 * (8192 + 64 * 8192)
    assert mix.bytes(heads) == kv_bytes + 2 * 2 * 32 * 128 * (2048 + 64)
    slow_memory = mix.least_s(heads, Ceilings(flops=1e18, bytes=4e12))
    assert slow_memory == pytest.approx(mix.bytes(heads) / 4e12)
    slow_compute = mix.least_s(heads, Ceilings(flops=1e12, bytes=1e18))
    assert slow_compute == pytest.approx((241e9 + mix.decode_flops(heads)) / 1e12, rel=0.01)


def test_ratios_pair_rounds_and_name_the_best() -> None:
    taken = {"own_serial": [4.0, 5.0, 8.0], "own_fused": [2.0, 5.0, 4.0]}
    others = {"stock_mixed": 10.0, "stock_serial": 6.0, "flashinfer_pod": 3.0}
    taken |= {name: [seconds] * 3 for name, seconds in others.items()}
    few = {"own_serial": [1.0], "own_fused": [0.9]}
    report = Report(Heads(), Ceilings(1.0, 1.0), {"samples": 3})
    report.results = [MixResult(MIXES[0], taken, 1.0), MixResult(MIXES[1], few, 1.0)]
    document = json.loads(json.dumps(report.document()))
    ratios = document["ratios"]
    assert ratios["fused_over_own_serial"] == {"value": 0.7, "min": 0.5, "max": 1.0, "n": 4}
    assert ratios[f"fused_over_own_serial: {MIXES[0].name}"]["value"] == 0.5
    assert ratios["fused_over_best_serial"]["n"] == 3
    assert ratios["fused_over_best_serial"]["max"] == pytest.approx(5 / 3)
    best = {MIXES[0].name: "flashinfer_pod", MIXES[1].name: None}
    assert document["settings"]["best_other"] == best
    assert set(document) == {"machine", "versions", "settings", "ratios", "raw"}
