"""Memory that a forward pass frees stays with the process, as page faults show."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from sglang_tiered.integration.cpu import malloc

# Blocks of 8 MB taken and given back 20 times, as the layers of a prefill do; prints page faults.
SCRIPT = """
import resource
import torch
from sglang_tiered.integration.cpu.malloc import keep_freed_memory
assert {keep} is False or keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def layers(number):
    for _ in range(number):
        a = torch.ones(2_000_000)
        b = a + 1
        del a, b
layers(5)
before = faults()
layers(20)
print(faults() - before)
"""


def num_faults(*, keep: bool) -> int:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(keep=keep)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"MALLOC_MMAP_THRESHOLD_": "131072", "PATH": ""} if not keep else {"PATH": ""},
    )
    return int(result.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_blocks_stay_in_the_process() -> None:
    """Beside a process whose C library gives every large block back."""
    assert num_faults(keep=True) * 10 < num_faults(keep=False)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not malloc.keep_freed_memory()
