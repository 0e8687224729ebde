"""The namespace: a digest of everything that gives stored KV bytes their meaning.

Pages of one namespace are never read under another. Tokens and tenants (``extra_key``,
``cache_salt``) are not in it: SGLang's page keys, a SHA-256 chain seeded by both, already tell
those apart.

Every setting of SGLang's for the model counts unless it is known to have no effect: a setting that
a new version adds is part of the identity at once. Files that a setting names count by their bytes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import uuid
from functools import cache
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.fields.model import Model
from sglang.srt.environ import envs
from sglang.srt.runtime_context import (
    get_disagg,
    get_exec,
    get_lora,
    get_model,
    get_observability,
    get_serving,
    get_spec,
)

from sglang_tiered.codecs import LOSSY_CODEC_NAMES
from sglang_tiered.integration.identity.model import (
    FileContents,
    identify_files,
    identify_model,
    unresolved,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from sglang_tiered.config import TransferConfig
    from sglang_tiered.integration.identity.file_digests import SeenFile


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

# Settings that locate the model: its files count instead.
_PLACES = {"model_path", "revision", "download_dir"}
_FILES = {
    "decrypted_config_file",
    "decrypted_draft_config_file",
    "modelopt_checkpoint_restore_path",
    "quantization_param_path",
    "rl_quant_profile",
}
# Settings that change how it is loaded, checked or written, but not what it computes.
_WITHOUT_MEANING = {
    "checkpoint_engine_wait_weights_before_ready",
    "delete_ckpt_after_loading",
    "engine_info_bootstrap_port",
    "model_checksum",
    "modelexpress_config",
    "modelopt_checkpoint_save_path",
    "modelopt_export_path",
    "remote_instance_weight_loader_backend",
    "remote_instance_weight_loader_seed_instance_ip",
    "remote_instance_weight_loader_seed_instance_service_port",
    "remote_instance_weight_loader_send_weights_group_ports",
    "remote_instance_weight_loader_start_seed_via_transfer_engine",
    "startup_weight_load_mode",
    "weight_cache_mode",
    "weight_cache_socket",
    "weight_cache_timeout",
    "weight_loader_disable_mmap",
    "weight_loader_drop_cache_after_load",
    "weight_loader_prefetch_checkpoints",
    "weight_loader_prefetch_num_threads",
}

# Settings beyond the model's own that change number formats, by SGLang's groups of them.
_NUMBER_FORMATS = {
    "comm": ("enable_quant_communications",),
    "deterministic": ("rl_on_policy_target",),
    "dllm": ("dllm_algorithm",),
    "features": ("enable_tf32_matmul",),
    "kernel": (
        "enable_deepseek_v4_fp4_indexer",
        "enable_precise_embedding_interpolation",
        "prefill_kv_cache_dequant_dtype",
    ),
    "mamba": (
        "enable_int8_mamba_checkpoint",
        "enable_mamba_cache_stochastic_rounding",
        "mamba_ssm_dtype",
    ),
    "moe": (
        "deepep_dispatcher_output_dtype",
        "enable_w4a4_mxfp4_megamoe",
        "enforce_shared_experts_fusion",
        "flashinfer_a2a_dispatch_type",
        "flashinfer_mxfp4_moe_precision",
        "kt_cpuinfer",
        "kt_max_deferred_experts_per_token",
        "kt_method",
        "kt_num_gpu_experts",
        "kt_threadpool_count",
    ),
}

# Variables that change what the weights are read as, or what is computed with them.
_VARIABLES = (
    "FLASHINFER_NVFP4_4OVER6",
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256",
    "SGLANG_CPU_QUANTIZATION",
    "SGLANG_DSV4_FP4_DEQUANT",
    "SGLANG_DSV4_FP4_EXPERTS",
    "SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE",
    "SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16",
    "SGLANG_FP4_IGNORED_LAYERS",
    "SGLANG_FP8_IGNORED_LAYERS",
    "SGLANG_HUMMING_INPUT_QUANT_CONFIG",
    "SGLANG_HUMMING_ONLINE_QUANT_CONFIG",
    "SGLANG_MAMBA_CONV_DTYPE",
    "SGLANG_MINICPM_DENSE_AS_SPARSE",
    "SGLANG_MINICPM_FORCE_DENSE",
    "SGLANG_MOE_NVFP4_DISPATCH",
    "SGLANG_MORI_DISPATCH_DTYPE",
    "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
    "SGLANG_SIMULATE_UNIFORM_EXPERTS",
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR",
)

_OF_DRAFT = {
    "draft",
    "draft_kv_cache_dtype",
    "draft_quantization",
    "draft_window",
    "speculative_algorithm",
}

_files_are_old = False

# The files as they were when the process loaded them: tiers may be attached again at any time.
_loaded_model, _loaded_files = cache(identify_model), cache(identify_files)


def has_draft() -> bool:
    """Return whether a draft model's KV is kept beside the model's own."""
    return get_spec().speculative_algorithm is not None


def drop_digests() -> None:
    """Note that the weights of this process were replaced, so that its files no longer identify
    them."""
    global _files_are_old  # noqa: PLW0603
    _files_are_old = True


def server_identity(storage_config: HiCacheStorageConfig) -> dict[str, Any]:
    """Return the model, weights, number formats and rank geometry of this scheduler process.
    ``FileContents`` in it stand for files that are still to be read.

    Reads SGLang's published configuration; call it after the model is loaded.
    """
    return {
        **_model_identity(),
        # SGLang's page keys contain the names and paths of --lora-paths, not the weights.
        "adapters": {
            adapter.lora_id: _loaded_model(adapter.lora_path, None, "auto")
            for adapter in get_lora().lora_paths or ()
        },
        "tp": [storage_config.tp_rank, storage_config.tp_size],
        "pp": [storage_config.pp_rank, storage_config.pp_size],
        "attn_cp": [storage_config.attn_cp_rank, storage_config.attn_cp_size],
        "dcp": [storage_config.dcp_rank, storage_config.dcp_size],
        "replay": get_exec().features.enable_decoder_swa_bounded_replay,
    }


def handoff_identity(declared: str | None, kv_format: str, *, with_draft: bool) -> dict[str, Any]:
    """Return what gives KV its meaning on its way to another server, whose ranks may be cut
    otherwise. It is ``server_identity`` without geometry, which the handoff compares by itself, and
    without adapters, which go with the requests that use them.

    ``declared``: a name that stands for the model at the operator's word (``--transfer-model``).
    ``kv_format``: the number format of an element. ``with_draft``: a draft model's KV goes along.
    """
    common = {"kv_format": kv_format}
    if declared is not None:
        version = importlib.metadata.version("sglang")
        of_weights = get_serving().weight_version
        return {**common, "declared": declared, "sglang": version, "weight_version": of_weights}
    identity = _model_identity()
    if not with_draft:
        identity = {name: value for name, value in identity.items() if name not in _OF_DRAFT}
    # A prefill that replays leaves windows out which decode without it would match; for models that
    # do not, unset and off are the same.
    replay = bool(get_exec().features.enable_decoder_swa_bounded_replay)
    return {**common, "replay": replay, **identity}


def updated_identity(before: bytes, path: str, load_format: str | None) -> dict[str, Any]:
    """Return the identity of weights that were read from ``path`` over those of ``before``.

    The files need not name every weight, so what was there before counts. Call it afterwards.
    """
    model = get_model()
    how = str(load_format or model.load_format)
    return {"before": before.hex(), "files": identify_model(path, None, how, model.download_dir)}


def received_identity(transfer: TransferConfig | None) -> dict[str, Any]:
    """Return what sets KV that this server received apart from KV that it computed; empty where
    nothing does. It is part of the namespace, since a page does not tell which of the two it is."""
    if transfer is None:
        return {}
    disagg = get_disagg()
    if disagg.disaggregation_mode != "decode" and not disagg.enable_pd_role_switch:
        return {}
    received: dict[str, Any] = {}
    if transfer.codec in LOSSY_CODEC_NAMES:
        received["transfer_codec"] = transfer.codec
    if transfer.model_name is not None:
        received["transfer_model"] = transfer.model_name
    return received


def _model_identity() -> dict[str, Any]:
    # Plain attribute reads: a name that SGLang no longer has must stop the server, because an
    # incomplete identity would let pages of another meaning be read.
    model, spec = get_model(), get_spec()
    groups = {group: getattr(get_exec(), group) for group in _NUMBER_FORMATS}
    apart = _PLACES | _FILES | _WITHOUT_MEANING
    draft_path = spec.speculative_draft_model_path
    return {
        "sglang": importlib.metadata.version("sglang"),
        "model": _model(model),
        "settings": {
            name: getattr(model, name) for name in Model.__struct_fields__ if name not in apart
        },
        "number_formats": {
            name: getattr(groups[group], name)
            for group, names in _NUMBER_FORMATS.items()
            for name in names
        },
        "variables": {name: getattr(envs, name).get() for name in _VARIABLES},
        "experts_shared_outer_loras": get_lora().experts_shared_outer_loras,
        "files": {
            **{name: _loaded_files(getattr(model, name)) for name in sorted(_FILES)},
            "kt_weight_path": _loaded_files(groups["moe"].kt_weight_path),
            "uno_lora_path": _loaded_files(spec.uno_lora_path),
            **_loader_files(model.model_loader_extra_config),
        },
        "draft": draft_path
        and _loaded_model(
            draft_path,
            spec.speculative_draft_model_revision,
            str(spec.speculative_draft_load_format or model.load_format),
            model.download_dir,
        ),
        # SGLang registers a draft model's pool too late to be in the digest.
        "draft_kv_cache_dtype": spec.speculative_draft_kv_cache_dtype,
        "draft_quantization": [
            spec.speculative_draft_model_quantization,
            spec.speculative_enable_w4a4_mxfp4_megamoe,
            envs.SGLANG_NVFP4_CKPT_FP8_NEXTN_MOE.get(),
            envs.SGLANG_GLM_NEXTN_MOE_PTPC.get(),
        ],
        "draft_window": [spec.speculative_draft_window_size, spec.speculative_draft_sink_size],
        "speculative_algorithm": spec.speculative_algorithm,
        "weight_version": get_serving().weight_version,
    }


def _model(model: Any) -> FileContents | str:
    if _files_are_old:
        return unresolved(model.model_path, "they were replaced while the server ran")
    if get_observability().forward_hooks or envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get():
        why = "--forward-hooks or SGLANG_EXTERNAL_MODEL_PACKAGE run code of no model file"
        return unresolved(model.model_path, why)
    if model.weight_cache_mode != "off":
        return unresolved(model.model_path, "they come from a weight cache")
    return _loaded_model(
        model.model_path, model.revision, str(model.load_format), model.download_dir
    )


def _loader_files(extra_config: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the contents of files that ``--model-loader-extra-config`` names."""
    config = json.loads(extra_config) if isinstance(extra_config, str) else extra_config or {}
    return {
        f"loader {name}": _loaded_files(value)
        for name, value in config.items()
        if isinstance(value, str) and ("path" in name or os.path.exists(value))
    }


def describe_pool(pool: Any) -> dict[str, Any]:
    """Return the geometry of one host pool as plain values."""
    described: dict[str, Any] = {"class": type(pool).__name__, "dtype": str(pool.dtype)}
    for name in _POOL_ATTRIBUTES:
        value = getattr(pool, name, None)
        described[name] = value if isinstance(value, (int, str, type(None))) else str(value)
    return described


def files_of(identity: Mapping[str, Any]) -> set[SeenFile]:
    """Return the files that must be read to spell an identity out."""
    found: list[Any] = []
    json.dumps(identity, default=found.append)
    return {file for each in found if isinstance(each, FileContents) for _, file in each.files}


def spell_out(
    identity: Mapping[str, Any],
    pools: Mapping[str, Mapping[str, Any]],
    digests: Mapping[SeenFile, bytes],
) -> str:
    """Return what a namespace is the digest of: the identity, with files by their digests, and
    every pool, by name."""

    def text_of(value: Any) -> str:
        return value.digest(digests) if isinstance(value, FileContents) else str(value)

    document = {"version": NAMESPACE_VERSION, "identity": identity, "pools": pools}
    return json.dumps(document, sort_keys=True, separators=(",", ":"), default=text_of)


def successor(namespace: bytes) -> bytes:
    """Return a namespace that no process has had before: for weights changed in a running server,
    which have no files to identify them."""
    return hashlib.sha256(namespace + uuid.uuid4().bytes).digest()
