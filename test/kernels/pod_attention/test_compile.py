"""What the compiler makes of the kernel for sm_90, which takes no GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from compiler_requests import compiler_requests
from pod_cases import make_case, shape_of, sinks_of

from sglang_tiered_kernels.pod_attention import CONFIGS, make_plan

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no compiler"
    ),
]


BATCHES = [
    # Tile counts, tickets, offsets and splits that are 1, odd, and multiples of 16.
    ([16], [16]),
    ([1], [16]),
    ([61, 1, 1, 1, 5, 0], [90, 22, 150, 40, 0, 7]),
    ([64, 1], [0, 31]),
    ([1] * 16, [300] * 16),
    ([512] + [1] * 33, [17] + [900] * 33),
    ([16] + [1] * 33, [17] + [900] * 33),  # few prefill tiles, so blocks persist
]


@pytest.mark.parametrize("options", [{}, {"sinks": True, "logit_cap": 5.0, "window": 400}])
def test_no_batch_makes_a_warm_server_compile_again(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    from sglang_tiered_kernels.pod_attention import launch

    requests = compiler_requests(monkeypatch)
    shape = shape_of(heads=(8, 2), head_dim=128)
    window = options.get("window", -1)
    kind = {
        "logit_cap": options.get("logit_cap", 0.0),
        "sinks": sinks_of(shape) if options.get("sinks") else None,
    }
    cache = torch.zeros(512, 2, 128, dtype=shape.kv_dtype)
    launch.warm_up(
        cache, cache, shape, [CONFIGS["A"]], index_dtype=torch.int64, window=window, **kind
    )
    # Both roles together by two schedules, each alone, and the merge.
    warm = {request["key"] for request in requests}
    assert len(warm) == 5
    requests.clear()
    for layer, (extend, prefix) in enumerate(BATCHES * 2):
        case = make_case(extend, prefix, shape, window=window)
        plan = make_plan(extend, prefix, shape, num_sms=132, window=window, config=CONFIGS["A"])
        # Views into larger buffers begin anywhere.
        indices = torch.cat([torch.zeros(layer % 4, dtype=torch.int64), case.kv_indices])
        launch.run(
            *(case.q, case.k_cache, case.v_cache, case.out, case.kv_indptr, indices[layer % 4 :]),
            plan,
            prefill=len(plan.prefill_units) > 0,
            decoding=len(plan.decode_units) > 0,
            **{"schedule": plan.schedule, "scale": 0.125, "v_scale": 1, **kind},
        )
    assert {request["key"] for request in requests} == warm
