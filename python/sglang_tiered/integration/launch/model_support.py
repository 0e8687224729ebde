"""Refuses models that the tiers cannot serve, once SGLang has read the model's configuration.

Everything HiCache serves is served. What it does not serve would run silently without tiers, which
the operator who asked for them would not notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_tiered.config import TierMode
from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from sglang_tiered.config import TieredConfig

__all__ = ["check_model"]


def check_model(server_args: Any, config: TieredConfig) -> None:
    """Raise ``ConfigError`` for a model or flags that leave nothing to tier. Call it before a model
    is loaded. ``server_args`` is SGLang's resolved view.
    """
    if config.mode is TierMode.OFF:
        return
    from sglang.srt.arg_groups.overrides import model_config_of

    _check(
        architecture=model_config_of(server_args).hf_config.architectures[0],
        # A decode server of a disaggregated pair has no radix cache by default, and that is fine.
        has_radix_cache=(
            not server_args.disable_radix_cache or server_args.disaggregation_mode == "decode"
        ),
        is_hybrid_swa=model_config_of(server_args).is_hybrid_swa,
        full_attention_layers=model_config_of(server_args).full_attention_layer_ids,
    )
    if config.nvme is not None and config.nvme.checkpoint_tokens is not None:
        _check_checkpoints(server_args, is_hybrid_swa=model_config_of(server_args).is_hybrid_swa)
    _check_workers(server_args.tokenizer_worker_num)
    _check_rows_by_slot(server_args)


def _check(
    *,
    architecture: str,
    has_radix_cache: bool,
    is_hybrid_swa: bool,
    full_attention_layers: list[int] | None,
) -> None:
    if not has_radix_cache:
        raise ConfigError(
            f"SGLang turns its radix cache off for {architecture} under these flags, and the "
            "tiers hold what the radix cache does; pass --tier-mode off."
        )
    if is_hybrid_swa and full_attention_layers is not None and not full_attention_layers:
        raise ConfigError(
            f"every layer of {architecture} has a sliding window, and SGLang caches such a model "
            "in device memory only; pass --tier-mode off."
        )


def _check_checkpoints(server_args: Any, *, is_hybrid_swa: bool) -> None:
    """Their trees would drop a window that is in use, or take a draft's row for the answer's."""
    for reason, is_so in (
        ("a sliding window", is_hybrid_swa),
        ("--speculative-algorithm", server_args.speculative_algorithm is not None),
        ("--strip-thinking-cache", server_args.strip_thinking_cache),
        ("--pp-size", server_args.pp_size > 1),
        (
            f"--hicache-write-policy {server_args.hicache_write_policy}",
            server_args.hicache_write_policy != "write_through",
        ),
    ):
        if is_so:
            raise ConfigError(
                f"--tier-checkpoint-tokens keeps nothing of a running answer with {reason}; drop "
                "either."
            )


def _check_rows_by_slot(server_args: Any) -> None:
    """SGLang keeps these rows beside the KV, by device slot. A prefix that comes back from host
    memory or NVMe gets other slots, with the rows of another prompt, and so does whoever finds it
    on the device afterwards."""
    for name in ("enable_return_routed_experts", "enable_return_indexer_topk"):
        if getattr(server_args, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} would answer with rows of other prompts where a prefix comes from a "
                "tier, because SGLang keeps them by place in device memory only; drop it, or pass "
                "--tier-mode off."
            )


def _check_workers(num_workers: int) -> None:
    if num_workers > 1:
        raise ConfigError(
            f"--tokenizer-worker-num {num_workers} leaves the server without the /tier calls, ids "
            "of conversations and checks of image hashes, because SGLang's tokenizer workers load "
            "no plugins; drop it, or pass --tier-mode off."
        )
