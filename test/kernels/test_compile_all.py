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


def test_kernel_that_fails_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_tiered_kernels import compile_all  # loads the compiler

    def fail() -> str:
        raise ValueError("no such layout")

    monkeypatch.setattr(
        compile_all, "_kernels", lambda: iter([("bad", fail), ("good", lambda: "fine")])
    )
    assert compile_all.main() == 1
    said = capsys.readouterr().out
    assert "no such layout" in said and "fine" in said and "1 failed" in said
