"""Compile the kernel for sm_90 on any machine and read what limits its occupancy.

``python -m sglang_tiered_kernels.pod_attention.tuning --report`` prints it for every shipped
configuration. ``heuristics`` has the configurations.

Triton's wheel carries the assembler and the tools, so none of this needs a GPU or CUDA. Importing
this needs Triton, and compiling needs ``TRITON_INTERPRET`` unset.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from sglang_tiered_kernels.pod_attention import launch
from sglang_tiered_kernels.pod_attention.heuristics import CONFIGS, PodConfig
from sglang_tiered_kernels.pod_attention.shape import PodShape
from sglang_tiered_kernels.pod_attention.triton_kernel import (
    ANY_ALIGNMENT,
    PER_BATCH,
    merge_kernel,
    pod_kernel,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


_TARGET = GPUTarget("cuda", 90, 32)
# Of an SM of compute capability 9.0, CUDA C++ Programming Guide.
_REGISTERS, _SHARED_BYTES, _WARPS = 65536, 227 * 1024, 64
# What the runtime keeps of each block's shared memory.
_RESERVED_SHARED_BYTES = 1024
_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
# The shape the report is about: Llama 3 8B, token-slot indirection.
_REPORTED = PodShape(32, 8, 128, 1, torch.bfloat16, torch.bfloat16)
_ROLES = {"fused": launch.BOTH, "prefill": launch.PREFILL, "decode": launch.DECODE}


@dataclass(frozen=True)
class Compiled:
    """The resources of an SM that one variant of the kernel needs.

    registers: per thread. spill_bytes: of local memory per thread. shared_bytes: per thread block.
    tensor_ops: warp-group matrix instructions in the code; async_copies: loads from global to
    shared memory that bypass registers. Both are counts of instructions, not of executions.
    buffers: in shared memory, for each pipelined load of keys or values, loop by loop: those of
    prefill first. waits: the copies that may still be under way at each wait within a loop; 0 is a
    load that nothing overlaps.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    tensor_ops: int
    async_copies: int
    buffers: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()

    @property
    def ctas_per_sm(self) -> int:
        by_registers = _REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.num_warps)
        by_shared = _SHARED_BYTES // (self.shared_bytes + _RESERVED_SHARED_BYTES)
        return min(by_registers, by_shared, _WARPS // self.num_warps)


def signature(
    shape: PodShape, constants: dict[str, Any], index_dtype: torch.dtype = torch.int32
) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]:
    """The types of the kernel's arguments in order, and which are known to be multiples of 16, as
    a launch of a server's tensors has them."""
    query, cache = _POINTERS[shape.q_dtype], _POINTERS[shape.kv_dtype]
    pointers = {
        "q_ptr": query,
        "out_ptr": query,
        "sinks_ptr": query,
        "k_ptr": cache,
        "v_ptr": cache,
        "partial_out": "*fp32",
        "partial_lse": "*fp32",
        "counters": "*i32",
        "table": "*i32",
        "kv_indptr": "*i32",
        "kv_indices": "*i32" if index_dtype == torch.int32 else "*i64",
        "trace": "*i64" if constants["TRACE"] else "*i32",
    }
    floats = {"qk_scale", "cap", "v_scale"}
    types: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for place, name in enumerate(pod_kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
            continue
        types[name] = pointers.get(name, "fp32" if name in floats else "i32")
        if name not in {*floats, *PER_BATCH, *ANY_ALIGNMENT}:
            attributes[place,] = [["tt.divisibility", 16]]
    return types, attributes


def compile_pod(
    shape: PodShape,
    config: PodConfig,
    roles: int,
    *,
    index_dtype: torch.dtype = torch.int32,
    **options: Any,
) -> Compiled:
    """Compile for sm_90. options: of ``launch.constants``. Takes seconds; Triton caches the
    result by the sources. Raises RuntimeError under ``TRITON_INTERPRET``."""
    if not isinstance(pod_kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, so there is no compiler; unset it")
    constants = launch.constants(shape, config, roles=roles, **options)
    compiler_options = {
        name: constants.pop(name) for name in launch.COMPILER_OPTIONS if name in constants
    }
    types, attributes = signature(shape, constants, index_dtype)
    return _compile(pod_kernel, types, constants, attributes, compiler_options)


def compile_merge(shape: PodShape, *, sinks: bool = False) -> Compiled:
    """Like ``compile_pod``, for the kernel that merges split rows."""
    if not isinstance(merge_kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, so there is no compiler; unset it")
    constants = launch.merge_constants(shape, sinks=sinks)
    options = {name: constants.pop(name) for name in launch.COMPILER_OPTIONS if name in constants}
    pointers = {"out_ptr": _POINTERS[shape.q_dtype], "sinks_ptr": "*fp32", "units": "*i32"}
    pointers |= {"partial_out": "*fp32", "partial_lse": "*fp32", "v_scale": "fp32"}
    types: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for place, name in enumerate(merge_kernel.arg_names):
        types[name] = "constexpr" if name in constants else pointers.get(name, "i32")
        if name not in {*constants, "v_scale", "units", "sinks_ptr"}:
            attributes[place,] = [["tt.divisibility", 16]]
    return _compile(merge_kernel, types, constants, attributes, options)


def _compile(
    function: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    attributes: dict[tuple[int], list[list[Any]]],
    compiler_options: dict[str, Any],
) -> Compiled:
    source = ASTSource(
        fn=function,
        signature=types,
        constexprs={(function.arg_names.index(k),): v for k, v in constants.items()},
        attrs=attributes,
    )
    kernel = triton.compile(source, target=_TARGET, options=compiler_options)
    usage, code = _inspect(kernel.asm["cubin"])
    buffers, waits = _pipelines(kernel.asm["ttgir"])
    return Compiled(
        registers=usage["REG"],
        spill_bytes=usage["STACK"],
        shared_bytes=kernel.metadata.shared,
        num_warps=compiler_options["num_warps"],
        tensor_ops=len(re.findall(r"\bHGMMA\b", code)),
        async_copies=len(re.findall(r"\bLDGSTS\b", code)),
        buffers=buffers,
        waits=waits,
    )


def _pipelines(ir: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``Compiled.buffers`` and ``Compiled.waits`` of a kernel in Triton's GPU dialect."""
    buffers = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ir)
    waits: list[str] = []
    loops: list[int] = []  # how far the loops around this line are indented
    for line in ir.splitlines():
        indent = len(line) - len(line.lstrip())
        if loops and indent <= loops[-1]:
            loops.pop()
        if " scf.for " in line:
            loops.append(indent)
        elif loops:
            waits += re.findall(r"ttg\.async_wait\b.*\{num = (\d+)", line)
    return tuple(map(int, buffers)), tuple(map(int, waits))


def _inspect(cubin: bytes) -> tuple[dict[str, int], str]:
    """Resource usage by the assembler's names, and the machine code as text."""
    tools = Path(nvidia.__file__).parent / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def output(*command: str | Path) -> str:
            return subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=60
            ).stdout

        usage = output(tools / "cuobjdump", "-res-usage", path)
        code = output(tools / "nvdisasm", "-c", path)
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    return {name: int(value) for name, value in found.items()}, code


def report() -> str:
    """A Markdown table of every shipped configuration in every role."""
    lines = [
        f"Triton {triton.__version__}, sm_90, {_REPORTED.num_q_heads} query heads, "
        f"{_REPORTED.num_kv_heads} KV heads, head_dim {_REPORTED.head_dim}, bfloat16, "
        "32-bit token slots, ticket schedule",
        "",
        "| config | role | warps | block_m x block_n, decode | registers | spill bytes "
        "| shared KiB | CTAs per SM | K/V buffers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for config in CONFIGS.values():
        for name, roles in _ROLES.items():
            made = compile_pod(_REPORTED, config, roles)
            lines.append(
                f"| {config.name} | {name} | {made.num_warps} "
                f"| {config.block_m} x {config.block_n}, {config.block_n_decode} "
                f"| {made.registers} | {made.spill_bytes} | {made.shared_bytes / 1024:.1f} "
                f"| {made.ctas_per_sm} | {_buffers_of(made)} |"
            )
    return "\n".join(lines)


def _buffers_of(made: Compiled) -> str:
    """Each number once, in order: "3, 2" where prefill has three and decode two."""
    return ", ".join(map(str, dict.fromkeys(made.buffers)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_tiered_kernels.pod_attention.tuning",
        description="Compile the shipped configurations for sm_90. Needs no GPU.",
    )
    parser.add_argument(
        "--report", action="store_true", required=True, help="print what each one needs of an SM"
    )
    parser.parse_args(arguments)
    print(report())


if __name__ == "__main__":
    main()
