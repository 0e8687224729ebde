"""What would run without tiers is refused, not served silently."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.cpu.platform import ReferenceCpuPlatform
from sglang_tiered.integration.launch import start

SERVED: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "has_radix_cache": True,
    "is_hybrid_swa": False,
    "full_attention_layers": None,
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"has_radix_cache": False}, "turns its radix cache off for LlamaForCausalLM"),
        ({"is_hybrid_swa": True, "full_attention_layers": []}, "every layer of LlamaForCausalLM"),
    ],
)
def test_model_that_would_run_without_tiers_is_refused(
    change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        start._check_is_cached(**{**SERVED, **change})
    message = str(caught.value)
    assert message.endswith("pass --tier-mode off.") and "\n" not in message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"strip_thinking_cache": True}, "--strip-thinking-cache"),
        ({"pp_size": 2}, "--pp-size"),
        ({"hicache_write_policy": "write_back"}, "--hicache-write-policy write_back"),
        ({}, "a sliding window"),
    ],
)
def test_checkpoints_that_would_keep_nothing_are_refused(
    change: dict[str, Any], reason: str
) -> None:
    plain = {"speculative_algorithm": None, "strip_thinking_cache": False, "pp_size": 1}
    plain["hicache_write_policy"] = "write_through"
    given = SimpleNamespace(**{**plain, **change})
    with pytest.raises(ConfigError, match=f"--tier-checkpoint-tokens .* with {reason}; drop"):
        start._check_checkpoints(given, is_hybrid_swa=not change)


@pytest.mark.parametrize(
    "given", [{"speculative_algorithm": "NGRAM"}, {"lora_paths": ["a=b"]}, {"enable_lora": True}]
)
def test_what_needs_a_gpu_is_refused_early(given: dict[str, Any]) -> None:
    """SGLang looks for the EAGLE family only; n-grams would end the scheduler."""
    settings = {"speculative_algorithm": None, "lora_paths": None, "enable_lora": None, **given}
    with pytest.raises(ConfigError, match=r"needs? a GPU"):
        ReferenceCpuPlatform().apply_server_args_defaults(SimpleNamespace(**settings))


@pytest.mark.parametrize("name", ["enable_return_routed_experts", "enable_return_indexer_topk"])
def test_rows_kept_by_slot_are_refused(name: str) -> None:
    """A prefix from a tier would answer with the rows of whoever had its slots before."""
    off = {"enable_return_routed_experts": False, "enable_return_indexer_topk": False}
    start._check_rows_by_slot(SimpleNamespace(**off))
    with pytest.raises(ConfigError, match="would answer with rows of other"):
        start._check_rows_by_slot(SimpleNamespace(**{**off, name: True}))
