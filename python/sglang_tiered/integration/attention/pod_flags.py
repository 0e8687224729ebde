"""Checks what ``--attention-backend pod`` is combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


_BACKEND_FLAGS = {
    "attention_backend": "--attention-backend",
    "prefill_attention_backend": "--prefill-attention-backend",
    "decode_attention_backend": "--decode-attention-backend",
}


def check_arguments(explicit: Mapping[str, Any], page_size: int) -> None:
    """Raise ``ConfigError`` with one sentence where the pod backend is combined with flags that
    make it useless or fail later. explicit: the user's flags by name. page_size: the server's."""
    named = [flag for name, flag in _BACKEND_FLAGS.items() if explicit.get(name) == "pod"]
    if not named:
        return
    prefill = explicit.get("prefill_attention_backend") or explicit.get("attention_backend")
    if prefill != "pod":
        raise ConfigError(
            f"{named[0]} pod would never see a mixed batch, since SGLang sends those to the "
            f"prefill backend, here {prefill or 'its default'}; pass --attention-backend pod or "
            "--prefill-attention-backend pod."
        )
    if explicit.get("enable_deterministic_inference"):
        raise ConfigError(
            f"{named[0]} pod cuts rows by what else is in the batch, so it cannot go with "
            "--enable-deterministic-inference; drop one of them."
        )
    if explicit.get("speculative_algorithm") and not explicit.get(
        "speculative_draft_attention_backend"
    ):
        raise ConfigError(
            f"{named[0]} pod has no draft backend for --speculative-algorithm "
            f"{explicit['speculative_algorithm']}; drop one of them, or pass "
            "--speculative-draft-attention-backend triton."
        )
    chunk = explicit.get("chunked_prefill_size")
    if not explicit.get("enable_mixed_chunk") or chunk is None:
        return
    if chunk <= 0:
        raise ConfigError(
            f"--enable-mixed-chunk has no effect with --chunked-prefill-size {chunk}; drop one of "
            "them."
        )
    if chunk < 2 * page_size:
        # SGLang takes the decode rows off the chunk, then rounds it down to whole pages.
        raise ConfigError(
            f"--chunked-prefill-size {chunk} has no whole page of {page_size} left beside a "
            "running request, so requests would run one after the other; pass at least "
            f"{2 * page_size} with --enable-mixed-chunk."
        )
