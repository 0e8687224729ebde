"""What would run without tiers is refused, not served silently."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_tiered.errors import ConfigError
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
