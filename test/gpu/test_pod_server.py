"""The ``pod`` attention backend in a server on a CUDA device: its kernels serve mixed batches."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
import torch

from server_process import Server
from sglang_tiered.demo.model import SHAPES, write_model

pytestmark = [
    *(pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(600)),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]


def test_mixed_batches_with_graphs_run_through_the_kernels(tmp_path: Path) -> None:
    """In bfloat16 a batch's shape may flip a token: tokens are compared on the CPU platform."""
    write_model(tmp_path / "demo", 0, SHAPES["8m"])
    source = random.Random(5)
    prompts = [[source.randrange(32, 127) for _ in range(n)] for n in range(200, 1800, 100)]
    server = Server.start(
        tmp_path / "demo",
        tmp_path / "server.log",
        *("--dtype", "bfloat16", "--tier-mode", "off", "--page-size", "64"),
        *("--attention-backend", "pod", "--enable-mixed-chunk", "--chunked-prefill-size", "256"),
    )
    try:
        answers = server.generate_all(prompts, concurrency=len(prompts), num_new=24)
        assert [len(answer.output_ids) for answer in answers] == [24] * len(prompts)
        state = server.request("/server_info")["internal_states"][0]["sglang_tiered_pod"]
        assert state["forwards"] > 0 and state["layers"] > 0 and state["other_layers"] == {}
    finally:
        server.kill()
