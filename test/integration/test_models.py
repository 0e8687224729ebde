"""Other KV shapes and other weights: latent attention, weight updates."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from conftest import ALWAYS, ROOT, SMALL, Launch, aligned, make_prompts

if TYPE_CHECKING:
    from pathlib import Path

    from server_process import Answer

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

LENGTH = 700
PROMPTS = make_prompts(3, 12, LENGTH)

LATENT_ATTENTION = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "vocab_size": 320,
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


def share_from_tiers(answers: list[Answer]) -> float:
    hits = sum(answer.cached["host"] + answer.cached["storage"] for answer in answers)
    return hits / (aligned(LENGTH) * len(answers))


@pytest.mark.slow
def test_latent_attention_pages_come_back(launch: Launch, model: Path, tmp_path: Path) -> None:
    latent = tmp_path / "latent"
    latent.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model / name, latent)
    (latent / "config.json").write_text(json.dumps(LATENT_ATTENTION))
    arguments = ("--load-format", "dummy", "--max-total-tokens", "2048")
    tiers = ("--tier-host-bytes", "6MiB", "--tier-dir", str(tmp_path / "kv"), *ALWAYS)
    server = launch(*arguments, *tiers, model_path=latent)
    first, second = (server.generate_all(PROMPTS, concurrency=2) for _ in range(2))
    assert [a.output_ids for a in first] == [a.output_ids for a in second]
    assert share_from_tiers(second) >= 0.97
    assert sum(answer.cached["storage"] for answer in second) > 0

    # Random weights have no identity: a restart must not take them for the same ones.
    server.stop()
    other = launch(*arguments, *tiers, model_path=latent)
    assert other.generate(PROMPTS[0]).num_cached == 0
    other.kill()


def test_replaced_weights_never_read_pages_of_the_old_ones(
    launch: Launch, model: Path, tmp_path: Path
) -> None:
    retrained = tmp_path / "retrained"
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_demo_model.py"), str(retrained), "--seed=1"],
        check=True,
        timeout=120,
    )
    tier_dir = str(tmp_path / "kv")
    reference = launch("--tier-mode", "off", model_path=retrained)
    expected = [reference.generate(prompt).output_ids for prompt in PROMPTS[:4]]
    reference.kill()

    server = launch(*SMALL, "--tier-dir", tier_dir)
    old = [server.generate(prompt).output_ids for prompt in PROMPTS[:4]]
    assert old != expected
    server.wait_for_state("nvme_pages", 4 * (LENGTH // 64))
    server.flush()  # with backups under way SGLang would replace the weights but keep the tree
    update = {"model_path": str(retrained), "flush_cache": True}
    assert server.request("/update_weights_from_disk", update)["success"]
    answers = [server.generate(prompt) for prompt in PROMPTS[:4]]
    assert [answer.output_ids for answer in answers] == expected
    assert all(answer.num_cached == 0 for answer in answers)
    server.wait_for_state("nvme_pages", 4 * (LENGTH // 64))
    server.flush()
    again = [server.generate(prompt) for prompt in PROMPTS[:4]]
    assert [answer.output_ids for answer in again] == expected
    assert all(answer.cached["storage"] == aligned(LENGTH) for answer in again)
    server.kill()
