"""Every kernel compiles for sm_90 with the installed Triton, none spills, and blocks share SMs."""

from __future__ import annotations

import os

import pytest

from sglang_tiered_kernels.pod_attention import CONFIGS

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no compiler"
    ),
]


def test_every_kernel_compiles_with_the_installed_triton(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from sglang_tiered_kernels import compile_all  # loads the compiler

    assert compile_all.main() == 0
    said = capsys.readouterr().out
    assert said.count("page_copy") == 3 and said.endswith("all compiled\n")
    assert said.count(" registers, ") == said.count(" 0 bytes spilled, ") >= 12
    for config in CONFIGS.values():
        (line,) = (each for each in said.splitlines() if f"pod {config.name}, fused" in each)
        assert line.endswith(f" {config.ctas_per_sm} an SM") and config.ctas_per_sm >= 2
