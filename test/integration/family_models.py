"""Tiny models of other architectures, with random weights and the demo model's tokenizer.

Like the demo model's, their outputs depend on the whole prompt: a wrong page shows in the text.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path


WINDOW = 128  # tokens; two pages
HIDDEN, HEADS, INTERMEDIATE, VOCABULARY = 256, 4, 512, 320
NUM_LAYERS, LATENT, LATENT_HEAD_DIM = 3, 64, 32
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
EMBEDDING_STD = 0.02  # small beside what the layers add, or a tied head repeats the last token
LATENT_ATTENTION = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "q_lora_rank": None,
    "qk_nope_head_dim": LATENT_HEAD_DIM,
    "qk_rope_head_dim": LATENT_HEAD_DIM,
    "v_head_dim": LATENT_HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": NUM_LAYERS,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 2,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
}


def write_sliding_window(demo: Path, out: Path) -> Path:
    """GraniteSWA, which SGLang serves from two pools (hybrid SWA): the demo model's own weights,
    two of its layers with a window and every layer with attention sinks."""
    weights = load_file(demo / "model.safetensors")
    config = json.loads((demo / "config.json").read_text())
    for layer in range(3):
        sinks = np.full(config["num_attention_heads"], 0.5 * layer, dtype=np.float32)
        weights[f"model.layers.{layer}.self_attn.sinks"] = sinks
    config |= {
        "architectures": ["GraniteSWAForCausalLM"],
        "model_type": "granite_swa",
        "attention_multiplier": config["head_dim"] ** -0.5,
        "embedding_multiplier": 1.0,
        "layer_rope_theta": [config["rope_theta"]] * 3,
        "layer_types": LAYER_TYPES,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "sliding_window": WINDOW,
    }
    return _write(demo, out, config, weights)


def write_latent_attention(demo: Path, out: Path) -> Path:
    """DeepSeek's latent attention (MLA): one vector per token in the place of keys and values."""
    source = np.random.default_rng(5)

    def matrix(rows: int, columns: int, std: float | None = None) -> np.ndarray:
        """It keeps the size of what it multiplies."""
        values = source.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(columns**-0.5 if std is None else std)

    ones = np.ones(HIDDEN, dtype=np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, EMBEDDING_STD),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    heads_dim = HEADS * LATENT_HEAD_DIM
    for number in range(NUM_LAYERS):
        layer = {
            "self_attn.q_proj": matrix(2 * heads_dim, HIDDEN),
            "self_attn.kv_a_proj_with_mqa": matrix(LATENT + LATENT_HEAD_DIM, HIDDEN),
            "self_attn.kv_a_layernorm": np.ones(LATENT, dtype=np.float32),
            "self_attn.kv_b_proj": matrix(2 * heads_dim, LATENT),
            "self_attn.o_proj": matrix(HIDDEN, heads_dim),
            "mlp.gate_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, INTERMEDIATE),
            "input_layernorm": ones,
            "post_attention_layernorm": ones,
        }
        weights |= {f"model.layers.{number}.{name}.weight": one for name, one in layer.items()}
    return _write(demo, out, LATENT_ATTENTION, weights)


def _write(demo: Path, out: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    out.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, out)
    (out / "config.json").write_text(json.dumps(config))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
