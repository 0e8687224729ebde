"""The modelled side: the requests that a server was sent, when it was sent them, on a modelled
server of what it measured."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

from serving_bench.setting import PAGE_SIZE
from sglang_tiered_lab.trace.cluster.plan import Member, Plan
from sglang_tiered_lab.trace.cluster.profiles import Kind
from sglang_tiered_lab.trace.cluster.simulation import run_cluster
from sglang_tiered_lab.trace.replay.server import Request
from sglang_tiered_lab.trace.replay.timing import Hardware

if TYPE_CHECKING:
    from collections.abc import Sequence

    from live_bench.asking import Measured
    from serving_bench.client import Sample
    from serving_bench.setting import Geometry
    from sglang_tiered_lab.trace.request import TraceRequest


TIERS = {"device": "device", "host": "host", "nvme": "storage"}  # the model's name, the server's


def kind_of(measured: Measured, geometry: Geometry, host_tokens: int) -> Kind:
    """Return a modelled server of these sizes, which takes what was measured."""
    batch_s, token_s, pair_s, copy_s = measured.prefill
    load_s, byte_s = measured.nvme
    token_bytes = measured.token_bytes
    hardware = Hardware(
        kv_bytes_per_token=token_bytes,
        prefill_fixed_s=batch_s,
        prefill_token_s=token_s,
        prefill_pair_s=pair_s,
        host_bytes_per_s=token_bytes / max(copy_s, 1e-9),
        host_fixed_s=0.0,
        nvme_read_bytes_per_s=1 / byte_s,
        nvme_write_bytes_per_s=1 / byte_s,  # not measured; stores are in the background
        nvme_fixed_s=load_s,
    )
    return Kind(
        name="live",
        hardware=hardware,
        step_s=(*measured.step_s, 0.0),
        kv_tokens=geometry.device_tokens,
        host_tokens=host_tokens,
        nvme_tokens=geometry.nvme_bytes // token_bytes,
        network_bytes_per_s=1.0,
        peer=(1.0, 1.0),
        bucket=(1.0, 1.0),
        price_per_hour=1.0,
        chunk_tokens=measured.chunk_tokens,
        page_tokens=PAGE_SIZE,
        mixes=False,
        outside_s=measured.outside_s,
    )


def compare(
    kind: Kind, trace: Sequence[TraceRequest], samples: Sequence[Sample], num_output: int
) -> dict[str, Any]:
    """Run what was asked on a server of this kind; return both sides' figures."""
    order = sorted(range(len(samples)), key=lambda number: samples[number].started_s)
    first_s = samples[order[0]].started_s
    requests = [
        Request(
            samples[number].started_s - first_s,
            samples[number].num_prompt,
            min(num_output, trace[number].output_length),
            trace[number].block_ids,
            False,
        )
        for number in order
    ]
    plan = Plan(
        members=[Member(kind=kind)],
        policy="in-turn",
        unit_tokens=PAGE_SIZE,
        tiers=frozenset({"host", "nvme"}),
    )
    outcome = run_cluster(plan, requests)
    total = sum(sample.num_prompt for sample in samples)
    live = figures([sample.ttft_s for sample in samples])
    modelled = figures(outcome.ttft_s)
    return {
        "live": live,
        "modelled": modelled,
        "live_hit_rate": {
            tier: sum(sample.cached[name] for sample in samples) / total
            for tier, name in TIERS.items()
        },
        "modelled_hit_rate": {tier: outcome.hit_tokens[tier] / total for tier in TIERS},
        "busy": outcome.busy,
        "modelled_ttft_s": [float(one) for one in outcome.ttft_s],
        "order": order,
    }


def figures(seconds: Sequence[float]) -> dict[str, float]:
    p50, p90 = np.percentile(seconds, (50, 90))
    return {"mean": statistics.fmean(seconds), "p50": float(p50), "p90": float(p90)}
