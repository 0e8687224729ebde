"""A Llama of a given shape with random weights in files, so that a restarted server knows them.

``python -m gpu_report.random_model FOLDER`` writes the one of 8B shape, once, and before it touches
memory that the machine grows only by use: a server sizes its host pool by what is there.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Iterator


STD = 0.02
WRITERS = 6
GIB = 1 << 30
GROWN_BYTES, GROWTH_S = 40 * GIB, 40.0
"""Memory to have before a server starts, and how long to ask for it."""


@dataclass(frozen=True)
class Shape:
    """``kv_bytes``: of one token, all layers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    dtype: torch.dtype
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


LLAMA_8B = Shape(4096, 32, 32, 8, 14336, 128256, torch.bfloat16)
TINY = Shape(256, 2, 4, 2, 512, 320, torch.float32, head_dim=64)


def write_model(folder: Path, shape: Shape) -> None:
    """A file for each layer and one for the rest, several at a time; the configuration comes last,
    so a folder that has it is whole and stays. All weights are parts of one row of random numbers,
    since making 16 GB of them takes longer than writing."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(WRITERS) as pool:
        under_way: deque[Future[None]] = deque()
        for name, tensors in _files(shape):
            if len(under_way) >= WRITERS:  # so that few layers are in memory
                under_way.popleft().result()
            under_way.append(pool.submit(save_file, tensors, folder / name))
        for future in under_way:
            future.result()
    written = folder / "config.later"
    written.write_text(json.dumps(_config(shape)))
    written.rename(folder / "config.json")


def _files(shape: Shape) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(1 << 22, generator=generator).mul_(STD).to(shape.dtype)
    place = 0

    def weight(*size: int) -> torch.Tensor:
        nonlocal place
        place += 4099  # so that no two begin alike
        count = torch.Size(size).numel()
        start = place % 4096
        repeated = row.repeat(-(-(start + count) // len(row)))
        return repeated[start : start + count].reshape(size)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ones = torch.ones(shape.hidden, dtype=shape.dtype)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        tensors = {
            f"{prefix}.self_attn.q_proj.weight": weight(queries, shape.hidden),
            f"{prefix}.self_attn.k_proj.weight": weight(keys, shape.hidden),
            f"{prefix}.self_attn.v_proj.weight": weight(keys, shape.hidden),
            f"{prefix}.self_attn.o_proj.weight": weight(shape.hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": weight(shape.intermediate, shape.hidden),
            f"{prefix}.mlp.up_proj.weight": weight(shape.intermediate, shape.hidden),
            f"{prefix}.mlp.down_proj.weight": weight(shape.hidden, shape.intermediate),
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.post_attention_layernorm.weight": ones.clone(),
        }
        yield f"layer-{layer:03d}.safetensors", tensors
    rest = {
        "model.embed_tokens.weight": weight(shape.vocabulary, shape.hidden),
        "lm_head.weight": weight(shape.vocabulary, shape.hidden),
        "model.norm.weight": ones,
    }
    yield "rest.safetensors", rest


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 32768,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": str(shape.dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def _grow_memory(wanted: int) -> None:
    """Touch memory until so much is available, or until it is seen not to grow."""
    held, begin = [], time.perf_counter()
    while _available() < wanted and time.perf_counter() - begin < GROWTH_S:
        before = _available()
        block = mmap.mmap(-1, GIB)
        block.madvise(mmap.MADV_HUGEPAGE)
        for place in range(0, GIB, 4096):
            block[place] = 1
        held.append(block)
        if before < 6 * GIB and before - _available() > GIB * 9 // 10:
            break
    for block in held:
        block.close()
    print(f"{len(held)} GiB touched, {_available() / GIB:.1f} GiB available")


def main() -> None:
    _grow_memory(GROWN_BYTES)
    begin = time.perf_counter()
    write_model(Path(sys.argv[1]), LLAMA_8B)
    print(f"the model is there after {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
