"""Every kernel compiles for sm_90 with the installed Triton, and one that does not is told."""

from __future__ import annotations

import os

import pytest

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
    assert said.count("page_copy") == 3 and said.count(" fused") >= 2
    assert "all compiled" in said
