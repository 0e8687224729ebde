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
    if config.nvme is not None and not config.nvme.trust_mm_hashes:
        _check_media(
            is_multimodal=model_config_of(server_args).is_multimodal,
            num_tokenizer_workers=server_args.tokenizer_worker_num,
        )


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


def _check_media(*, is_multimodal: bool, num_tokenizer_workers: int) -> None:
    if is_multimodal and num_tokenizer_workers > 1:
        raise ConfigError(
            f"--tokenizer-worker-num {num_tokenizer_workers} takes hashes of images from clients, "
            "because SGLang's tokenizer workers load no plugins; drop it, or pass "
            "--tier-trust-mm-hashes on where every client is trusted."
        )
