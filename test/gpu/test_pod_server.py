"""The ``pod`` attention backend in a server on a CUDA device: its kernels serve mixed batches."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from server_process import Server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.server,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]

ROOT = Path(__file__).resolve().parents[2]
NUM_NEW = 24


def test_mixed_batches_with_graphs_run_through_the_kernels(tmp_path: Path) -> None:
    """In bfloat16 a batch's shape may flip a token, so tokens are not compared here: the kernels'
    parity has tests of its own, and greedy equality is proven on the CPU platform in float32."""
    make_model = ROOT / "scripts" / "make_demo_model.py"
    subprocess.run([sys.executable, make_model, tmp_path / "demo"], check=True, timeout=120)
    source = random.Random(5)
    prompts = [
        [source.randrange(32, 127) for _ in range(length)] for length in range(200, 1800, 100)
    ]
    server = Server.start(
        tmp_path / "demo",
        tmp_path / "server.log",
        *("--dtype", "bfloat16", "--tier-mode", "off", "--page-size", "64"),
        *("--attention-backend", "pod", "--enable-mixed-chunk", "--chunked-prefill-size", "256"),
    )
    try:
        answers = server.generate_all(prompts, concurrency=len(prompts), num_new=NUM_NEW)
        assert [len(answer.output_ids) for answer in answers] == [NUM_NEW] * len(prompts)
        state = server.request("/server_info")["internal_states"][0]["sglang_tiered_pod"]
        assert state["forwards"] > 0
        assert state["layers"] > 0
        assert state["other_layers"] == {}
    finally:
        server.kill()
