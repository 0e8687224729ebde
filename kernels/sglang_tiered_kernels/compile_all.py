"""Compiles every kernel for sm_90 with the Triton that is installed; needs no GPU.

    python -m sglang_tiered_kernels.compile_all

One line a kernel: what it is, seconds, and what it takes of an SM or why it failed. Ends with 1 if
any failed. ``scripts/compile_kernels`` runs it with other versions of Triton, whose wheels carry
the assembler and its tools.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from sglang_tiered_kernels.page_copy.triton_kernel import page_copy_kernel
from sglang_tiered_kernels.pod_attention import PodShape, launch
from sglang_tiered_kernels.pod_attention.heuristics import CONFIGS
from sglang_tiered_kernels.pod_attention.triton_kernel import (
    ANY_ALIGNMENT,
    PER_BATCH,
    merge_kernel,
    pod_kernel,
)
from sglang_tiered_kernels.rotary import rotate_kernel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


_TARGET = GPUTarget("cuda", 90, 32)
_OPTIONS = ("num_warps", "enable_fp_fusion")
# Of an SM of compute capability 9.0, CUDA C++ Programming Guide.
_REGISTERS, _SHARED_BYTES, _WARPS = 65536, 227 * 1024, 64
# What the runtime keeps of each block's shared memory.
_RESERVED_SHARED_BYTES = 1024
_LLAMA_8B = PodShape(32, 8, 128, 64, torch.bfloat16, torch.bfloat16)
_ROLES = {"fused": launch.BOTH, "prefill": launch.PREFILL, "decode": launch.DECODE}
_SCALARS = ("qk_scale", "cap", "v_scale")
# Of arguments by name; all others are int32.
_TYPES = {
    **dict.fromkeys(("source", "of", "target", "to", "positions"), "*i64"),
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "sinks_ptr", "cos_sin"), "*bf16"),
    **dict.fromkeys(("partial_out", "partial_lse"), "*fp32"),
    **dict.fromkeys(("counters", "table", "units", "kv_indptr", "kv_indices"), "*i32"),
    **dict.fromkeys(_SCALARS, "fp32"),
}


class Needs(NamedTuple):
    """What a kernel takes of an SM: registers and bytes of spilled ones per thread, and how many
    thread blocks fit on one."""

    registers: int
    spill_bytes: int
    ctas_per_sm: int


def compile_kernel(kernel: Any, constants: dict[str, Any], aligned: Collection[str]) -> Needs:
    """Compile for sm_90. constants: constexprs and compiler options by name. aligned: arguments
    that are multiples of 16. Raises what Triton raises."""
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={
            name: "constexpr" if name in constants else _TYPES.get(name, "i32") for name in places
        },
        constexprs={
            (places[name],): value for name, value in constants.items() if name not in _OPTIONS
        },
        attrs={(places[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    num_warps = constants["num_warps"]
    made = triton.compile(
        source, target=_TARGET, options={name: constants[name] for name in _OPTIONS}
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        said = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", said)}
    by_registers = _REGISTERS // (-(-usage["REG"] // 8) * 8 * 32 * num_warps)
    by_shared = _SHARED_BYTES // (made.metadata.shared + _RESERVED_SHARED_BYTES)
    return Needs(usage["REG"], usage["STACK"], min(by_registers, by_shared, _WARPS // num_warps))


def all_kernels() -> Iterator[tuple[str, Any, dict[str, Any], Collection[str]]]:
    """Yield a name and the arguments of ``compile_kernel`` for each kernel, as a server of
    Llama 3 8B launches it."""
    compiler = {"num_warps": 4, "enable_fp_fusion": True}
    for name, source_paged, target_paged in (
        ("gather", True, False),
        ("scatter", False, True),
        ("between pools", True, True),
    ):
        constants = {
            "SOURCE_PAGED": source_paged,
            "TARGET_PAGED": target_paged,
            "ELEMENT": triton.language.int64,
            "ALIGNED": True,
            "BLOCK": 1024,
            **compiler,
        }
        yield f"page_copy {name}", page_copy_kernel, constants, ["row_elements"]
    for name, neox in (("halves", True), ("neighbours", False)):
        constants = {"HALF": 64, "BLOCK_D": 64, "BLOCK_H": 8, "NEOX": neox}
        yield f"rotary {name}", rotate_kernel, constants | compiler | {"num_warps": 1}, []
    for config in CONFIGS.values():
        for name, roles in _ROLES.items():
            constants = launch.constants(_LLAMA_8B, config, roles=roles)
            changing = {*constants, *PER_BATCH, *ANY_ALIGNMENT, *_SCALARS}
            aligned = set(pod_kernel.arg_names) - changing
            yield f"pod {config.name}, {name}", pod_kernel, constants, aligned
    constants = launch.merge_constants(_LLAMA_8B, sinks=False)
    changing = {*constants, *_SCALARS, "units", "sinks_ptr"}
    yield "pod merge", merge_kernel, constants, set(merge_kernel.arg_names) - changing


def main() -> int:
    """Print a line a kernel; 1 if any failed."""
    print(f"Triton {triton.__version__}, sm_90", flush=True)
    num_failed = 0
    for name, *what in all_kernels():
        begin = time.perf_counter()
        try:
            made = compile_kernel(*what)
            said = f"{made.registers} registers, {made.spill_bytes} bytes spilled, "
            said += f"{made.ctas_per_sm} an SM"
        except Exception as error:  # noqa: BLE001 - the next kernel may compile
            num_failed += 1
            said = f"FAILED: {type(error).__name__}: {str(error).splitlines()[-1:]}"
        print(f"  {name:30s} {time.perf_counter() - begin:6.1f} s  {said}", flush=True)
    print(f"{num_failed} failed" if num_failed else "all compiled", flush=True)
    return min(1, num_failed)


if __name__ == "__main__":
    sys.exit(main())
