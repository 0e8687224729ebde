"""The namespace: a digest of everything that gives stored KV bytes their meaning.

Pages of one namespace are never read under another. Tokens and tenants (``extra_key``,
``cache_salt``) are not in it: SGLang's page keys, a SHA-256 chain seeded by both, already tell
those apart.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import TYPE_CHECKING, Any

from sglang_tiered.integration.model_identity import identify_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

__all__ = ["NAMESPACE_VERSION", "describe_pool", "digest", "server_identity", "successor"]

NAMESPACE_VERSION = 2
"""Raised when the meaning of a page changes without any field below changing."""

# Attributes of SGLang's host pools that decide the byte layout of a page; absent ones are None.
_POOL_ATTRIBUTES = (
    "layout",
    "page_size",
    "size_per_token",
    "layer_num",
    "target_layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "start_layer",
    "end_layer",
    "storage_format_tag",
)


def server_identity(storage_config: HiCacheStorageConfig) -> dict[str, Any]:
    """Model, weights, number formats and rank geometry of this scheduler process.

    Reads SGLang's published configuration; call it after the model is loaded.
    """
    import importlib.metadata

    from sglang.srt.runtime_context import get_lora, get_model, get_serving, get_spec

    # Plain attribute reads: a name that SGLang no longer has must stop the server, because an
    # identity with a hole in it would let pages of another meaning be read.
    model, spec = get_model(), get_spec()
    draft_path = spec.speculative_draft_model_path
    return {
        "sglang": importlib.metadata.version("sglang"),
        "model": identify_model(model.model_path, model.revision, str(model.load_format)),
        "draft": draft_path
        and identify_model(draft_path, spec.speculative_draft_model_revision, "auto"),
        # SGLang registers a draft model's pool too late to be in the digest.
        "draft_kv_cache_dtype": spec.speculative_draft_kv_cache_dtype,
        "draft_quantization": spec.speculative_draft_model_quantization,
        "speculative_algorithm": spec.speculative_algorithm,
        # SGLang's page keys know the adapters of --lora-paths by name and path, not by weights.
        "adapters": {
            adapter.lora_id: identify_model(adapter.lora_path, None, "auto")
            for adapter in get_lora().lora_paths or ()
        },
        "weight_version": get_serving().weight_version,
        "compute_dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_cache_dtype": str(model.kv_cache_dtype),
        "kv_scales": model.quantization_param_path,
        "model_override_args": str(model.json_model_override_args),
        "context_length": model.context_length,
        "tp": [storage_config.tp_rank, storage_config.tp_size],
        "pp": [storage_config.pp_rank, storage_config.pp_size],
        "attn_cp": [storage_config.attn_cp_rank, storage_config.attn_cp_size],
        "dcp": [storage_config.dcp_rank, storage_config.dcp_size],
    }


def describe_pool(pool: Any) -> dict[str, Any]:
    """The geometry of one host pool, as plain values."""
    described: dict[str, Any] = {"class": type(pool).__name__, "dtype": str(pool.dtype)}
    for name in _POOL_ATTRIBUTES:
        value = getattr(pool, name, None)
        described[name] = value if isinstance(value, (int, str, type(None))) else str(value)
    return described


def digest(identity: Mapping[str, Any], pools: Mapping[str, Mapping[str, Any]]) -> bytes:
    """32 bytes over the identity and every pool, by name."""
    document = {"version": NAMESPACE_VERSION, "identity": identity, "pools": pools}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).digest()


def successor(namespace: bytes) -> bytes:
    """A namespace no process has had before: for weights changed in a running server, whose
    identity nobody can name."""
    return hashlib.sha256(namespace + uuid.uuid4().bytes).digest()
