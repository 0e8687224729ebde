"""Compiles every kernel for sm_90 with the Triton that is installed; needs no GPU.

    python -m sglang_tiered_kernels.compile_all

One line a kernel: what it is, seconds, and what the compiler made of it or why it failed. Ends with
1 if any failed. ``scripts/compile_kernels`` runs it with other versions of Triton.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_tiered_kernels.page_copy.triton_kernel import page_copy_kernel
from sglang_tiered_kernels.pod_attention import PodShape, launch, tuning
from sglang_tiered_kernels.pod_attention.heuristics import CONFIGS
from sglang_tiered_kernels.rotary.triton_kernel import rotate_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_TARGET = GPUTarget("cuda", 90, 32)
_ROLES = {"fused": launch.BOTH, "prefill": launch.PREFILL, "decode": launch.DECODE}
_LLAMA_8B = PodShape(32, 8, 128, 64, torch.bfloat16, torch.bfloat16)


def compile_copy(*, source_paged: bool, target_paged: bool) -> str:
    """PTX of ``page_copy`` for rows of 8 KiB and more at addresses that are multiples of 16 bytes.
    Raises what Triton raises."""
    constants: dict[str, Any] = {
        "SOURCE_PAGED": source_paged,
        "TARGET_PAGED": target_paged,
        "ELEMENT": triton.language.int64,
        "ALIGNED": True,
        "BLOCK": 1024,
    }
    names = page_copy_kernel.arg_names
    pointers = dict.fromkeys(("source", "of", "target", "to"), "*i64")
    source = ASTSource(
        fn=page_copy_kernel,
        signature={
            name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names
        },
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index("row_elements"),): [["tt.divisibility", 16]]},
    )
    made = triton.compile(source, target=_TARGET, options={"enable_fp_fusion": True})
    code: str = made.asm["ptx"]
    return code


def compile_rotation(*, neox: bool) -> str:
    """PTX of ``rotate`` for heads of 128 in bfloat16. Raises what Triton raises."""
    constants: dict[str, Any] = {"HALF": 64, "BLOCK_D": 64, "BLOCK_H": 8, "NEOX": neox}
    pointers = {"q_ptr": "*bf16", "k_ptr": "*bf16", "positions": "*i64", "cos_sin": "*bf16"}
    names = rotate_kernel.arg_names
    source = ASTSource(
        fn=rotate_kernel,
        signature={
            name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names
        },
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={},
    )
    options = {"num_warps": 1, "enable_fp_fusion": True}
    code: str = triton.compile(source, target=_TARGET, options=options).asm["ptx"]
    return code


def _kernels() -> Iterator[tuple[str, Callable[[], str]]]:
    for name, source_paged, target_paged in (
        ("gather", True, False),
        ("scatter", False, True),
        ("between pools", True, True),
    ):
        copy = partial(compile_copy, source_paged=source_paged, target_paged=target_paged)
        yield f"page_copy {name}", partial(_lines, copy)
    for name, neox in (("halves", True), ("neighbours", False)):
        yield f"rotary {name}", partial(_lines, partial(compile_rotation, neox=neox))
    for config in CONFIGS.values():
        for name, roles in _ROLES.items():
            made = partial(tuning.compile_pod, _LLAMA_8B, config, roles)
            yield f"pod {config.name}, {name}", partial(_needs, made)
    yield "pod merge", partial(_needs, partial(tuning.compile_merge, _LLAMA_8B))


def _lines(make: Callable[[], str]) -> str:
    return f"{len(make().splitlines())} lines of PTX"


def _needs(make: Callable[[], tuning.Compiled]) -> str:
    made = make()
    return f"{made.registers} registers, {made.spill_bytes} bytes spilled, {made.ctas_per_sm} an SM"


def main() -> int:
    """Print a line a kernel; 1 if any failed."""
    print(f"Triton {triton.__version__}, sm_90", flush=True)
    num_failed = 0
    for name, make in _kernels():
        begin = time.perf_counter()
        try:
            said = make()
        except Exception as error:  # noqa: BLE001 - the next kernel may compile
            num_failed += 1
            said = f"FAILED: {type(error).__name__}: {str(error).splitlines()[-1:]}"
        print(f"  {name:30s} {time.perf_counter() - begin:6.1f} s  {said}", flush=True)
    print(f"{num_failed} failed" if num_failed else "all compiled", flush=True)
    return min(1, num_failed)


if __name__ == "__main__":
    sys.exit(main())
