"""A Llama of a given shape with random weights in files, so that a restarted server knows them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LLAMA_8B", "TINY", "Shape", "write_model"]

STD = 0.02


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
    """A file for each layer and one for the rest. All weights are parts of one row of random
    numbers, since making 16 GB of them takes longer than writing."""
    folder.mkdir(parents=True, exist_ok=True)
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
        save_file(tensors, folder / f"layer-{layer:03d}.safetensors")
    rest = {
        "model.embed_tokens.weight": weight(shape.vocabulary, shape.hidden),
        "lm_head.weight": weight(shape.vocabulary, shape.hidden),
        "model.norm.weight": ones,
    }
    save_file(rest, folder / "rest.safetensors")
    config = {
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
    (folder / "config.json").write_text(json.dumps(config))
