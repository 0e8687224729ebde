"""The SGLang versions and signatures that this package was checked against.

Upstream moves fast, so nothing here is assumed: the launcher calls ``check_version`` before it
imports SGLang, and every process calls ``check_signatures`` before the ``tiered`` names are
registered. Either fails with one sentence. The table holds what this package calls, hooks and
overrides, and the fields of SGLang's records that it reads where versions were seen to differ.
``seams`` compares all of it with another version, for ``scripts/compat``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import pkgutil
from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


SUPPORTED_VERSIONS = ("0.5.23",)

CHECKED_VERSION = "CHECKED_SGLANG_VERSION"
"""Names a version that runs although it is not listed. ``scripts/compat`` sets it for the servers
that it starts to find out whether the version could be, and nothing else may."""

_EVERY_SERVER = (
    "sglang_tiered.integration.hooks",
    "sglang_tiered.integration.cache.factory",
    "sglang_tiered.integration.cache.radix_cache",
    "sglang_tiered.integration.scheduler_messages",
    "sglang_tiered.integration.storage.backend",
)


def signatures(table: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """Return what ``check_signatures`` takes: by module of ``sglang.srt`` and class, parameters of
    functions and fields of records, as words. ``self`` is none of them."""
    return {
        f"sglang.srt.{owner}{'.' if ':' in owner else ':'}{name}": tuple(words.split())
        for owner, names in table.items()
        for name, words in names.items()
    }


# Every parameter that is passed by name or relied on by position, per seam; and every method that
# is overridden: one that SGLang no longer calls would be dropped without a word.
_SEAMS = {
    "arg_groups.fields.model": {  # every field of which is in the namespace
        "Model": (
            "model_path revision download_dir load_format model_loader_extra_config "
            "quantization kv_cache_dtype weight_cache_mode"
        ),
    },
    "configs.model_config": {"_get_and_verify_dtype": "config dtype"},
    "disaggregation.decode": {"DecodeTransferQueue.pop_transferred": ""},
    "disaggregation.decode:DecodePreallocQueue": {
        "__init__": "scheduler",
        "_create_receiver_and_enqueue": "req is_rebootstrap",
        "_start_hicache_prefetch": "req prefix_match",
        "_swa_tail_len": "seq_len",
        "_update_handshake_waiters": "",
        "_uses_swa_tail_prealloc": "",
        "pop_preallocated": "",
    },
    "disaggregation.kv_events": {"uses_dynamo_format": "kv_events_config"},
    "disaggregation.prefill": {"PrefillBootstrapQueue.create_sender": "req"},
    "disaggregation.utils": {
        "DisaggregationMode.to_engine_type": "mode",
        "get_kv_class": "transfer_backend class_type",
        "prepare_abort": "req error_message status_code",
    },
    "distributed.parallel_state": {"GroupCoordinator.all_gather_object": "obj"},
    "entrypoints.engine": {"_scheduler_died_error": "rank proc"},
    "entrypoints.engine:Engine": {
        "__init__": "kwargs",
        "_launch_detokenizer_subprocesses": "server_args port_args run_detokenizer_process_func",
        "_launch_scheduler_processes": (
            "server_args port_args run_scheduler_process_func placement_group"
        ),
        "shutdown": "",
    },
    "entrypoints.request_headers": {"apply_header_overrides": "obj headers"},
    "layers.attention.attention_registry": {"register_attention_backend": "name"},
    "layers.attention.base_attn_backend": {
        "AttentionBackend.forward_decode": "q k v layer forward_batch",
        "AttentionBackend.forward_extend": "q k v layer forward_batch",
        "AttentionBackend.init_forward_metadata": "forward_batch",
    },
    "managers.cache_controller": {
        "PrefetchAck": "rid operation completed_tokens pool_hits completed_req",
    },
    "managers.data_parallel_controller": {"DataParallelController.get_init_info": ""},
    "managers.io_struct": {
        "GenerateReqInput": (
            "bootstrap_host bootstrap_port bootstrap_room lora_path image_data video_data "
            "audio_data"
        ),
        "GenerateReqInput.normalize_batch_and_arguments": "",
        "PdRoleSwitchReqInput": "new_role prepare_only",
        "PdRoleSwitchReqOutput": "success message old_role new_role safe_to_restore",
    },
    "managers.kv_hints": {
        "KvHintAction": "action_id action_type action_version payload",
        "KvHintsEnvelope": "protocol_version message_id actions",
    },
    "managers.schedule_batch": {
        "Req.__init__": "lora_id extra_key cache_salt",
        "Req.owned_kv_len": "",
        "Req.refresh_fill_ids": "",
        "ReqKvInfo": "cache_inserted_len kv_committed_len",
    },
    "managers.schedule_policy": {
        "PrefillAdder._commit_prefill_admission": "req admission",
        "PrefillAdder._select_prefill_admission": "req has_chunked_req",
        "PrefillAdder.add_chunked_req": "req",
    },
    "managers.scheduler:Scheduler": {
        "__init__": "server_args",
        "_prefetch_kvcache": "req storage_hit_end",
        "_record_scheduler_state_for_paused_engine": "",
        "flush_cache": "empty_cache",
        "get_init_info": "",
        "init_request_dispatcher": "",
        "is_fully_idle": "for_health_check ignore_waiting",
        "on_idle": "",
        "process_batch_result": "batch result",
        "run_batch": "batch",
        "stash_chunked_request": "req",
    },
    "managers.scheduler_components.weight_updater": {
        "SchedulerWeightUpdaterManager.flush_cache_after_weight_update": "recv_req success message",
    },
    "managers.tokenizer_control_mixin": {"TokenizerControlMixin.dumper_control": "obj"},
    "managers.tokenizer_manager": {"ReqState": "obj dispatched"},
    "managers.tokenizer_manager:TokenizerManager": {
        "_create_tokenized_object": "obj input_text input_ids",
        "_dispatch_to_scheduler": "obj",
        "_tokenize_one_request": "obj",
        "abort_request": "rid",
        "generate_request": "obj request",
        "pd_role_switch": "obj request",
    },
    "mem_cache.buffer_mode.pipeline": {
        "BufferModePipeline.finish_backup_ack": "ack_id",
        "BufferModePipeline.is_idle": "",
        "_UnifiedBackupIntent": "snapshot",
        "_UnifiedBufferBackupEntry": "intent",
    },
    "mem_cache.buffer_mode.storage_existence_cache": {
        "PoolExistenceBeliefs.invalidate_beyond": "hashes keep_pages",
        "StorageExistenceCache.clear": "",
    },
    "mem_cache.cache_init_params": {"CacheInitParams": "sidecar_draft_device_pools"},
    "mem_cache.common": {
        "_req_radix_key": "tree_cache req token_ids max_prefix_len",
        "release_kv_cache": "req tree_cache checkpoint",
    },
    "mem_cache.hicache_auto_size": {"_estimate_hicache_bytes": "params draft_plan"},
    "mem_cache.hicache_storage": {
        "HiCacheStorageConfig": "dcp_rank dcp_size logical_page_size",
        "count_pool_hits": "results",
    },
    "mem_cache.hicache_storage:HiCacheStorage": {
        "batch_exists": "keys extra_info",
        "batch_exists_v2": "keys pool_transfers extra_info",
        "batch_get": "keys target_locations target_sizes",
        "batch_set": "keys values target_locations target_sizes",
        "exists": "key",
        "get": "key target_location target_sizes",
        "on_host_pools_registered": "",
        "set": "key value target_location target_sizes",
    },
    "mem_cache.host_memory": {"available_host_memory_bytes": "allow_cgroup_fallback"},
    "mem_cache.hybrid_cache.hybrid_cache_controller": {
        "PrefetchOperation": "handle token_ids last_hash prefix_keys pool_transfers assume_stored",
        "StorageOperation": "host_indices token_ids hash_value pool_transfers",
    },
    "mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController": {
        "_resolve_sidecar_kv_derived_pool_transfers": "operation",
        "_resolve_sidecar_nonkv_derived_pool_transfers": "operation",
        "_storage_hit_query": "operation",
        "_sync_prefetch_hit_query": "operation storage_hit_count",
        "_sync_trailing_keys": "pool_transfers all_hashes kv_hit_pages",
        "backup_thread_func": "",
        "prefetch": "handle new_input_tokens last_hash prefix_keys extra_pools assume_stored",
        "prefetch_io_aux_func": "",
        "prefetch_sync_thread_func": "",
        "prefetch_thread_func": "",
        "write_storage": "host_indices token_ids hash_value prefix_keys extra_pools",
    },
    "mem_cache.hybrid_cache.hybrid_pool_assembler": {"HybridCacheController": "storage_backend"},
    "mem_cache.kv_cache_builder": {"auto_size_hicache": "params draft_plan enabled"},
    "mem_cache.kv_cache_configurator": {
        "KVCacheConfigurator._profile_available_bytes": "pre_model_load_memory",
        "get_available_gpu_memory": "device gpu_id distributed cpu_group",
    },
    "mem_cache.pool_host.base": {
        "HostKVCache.__init__": "host_size pin_memory",
        "host_memory_budget_bytes": "requested_bytes auto_size",
        "ranks_per_host": "",
    },
    "mem_cache.registry": {
        "create_unified_radix_cache": "ctx cache_class",
        "default_radix_cache_factory": "ctx",
        "register_radix_cache_backend": "name factory",
    },
    "mem_cache.storage_prefetch": {
        "StoragePrefetchRetries.pop_ready": "waiting_queue interval max_attempts",
        "StoragePrefetchRetries.refetch": "req_id storage_hit_end",
    },
    "mem_cache.unified_cache.components.base": {
        "TreeComponent.prepare_prefetch": "node_id prefetch_tokens",
    },
    "mem_cache.unified_cache.unified_tree_core_interface:UnifiedTreeCoreInterface": {
        "begin_insert": "params",
        "build_backup_kv_action": "node_id",
        "build_hicache_transfers": "component_type node_id phase prefetch_tokens staging_tokens",
        "collect_path_info": "end_node_ids",
        "get_hash_values": "node_id",
        "get_last_hash_value": "node_id",
        "get_prefix_hash_values": "node_id",
        "is_backuped": "node_id",
        "prefetch_anchor_info": "node_id",
        "reset": "",
        "resume_insert": "",
    },
    "mem_cache.unified_radix_cache:UnifiedRadixCache": {
        "_all_reduce": "data tp_reduce_op",
        "_all_reduce_attn_groups": "tensor op",
        "_apply_cache_actions": "actions",
        "_drain_host_frees": "host_frees",
        "_drain_storage_control_queues_impl": (
            "n_storage_hit n_ack_prefetch n_backup n_release extra_release_counts log_metrics"
        ),
        "_execute_and_commit_kv_backup": "action write_back",
        "_execute_kv_backup": "node_id device_value",
        "_finish_write_through_ack": "ack_id",
        "_handle_prefetch_result": "operation",
        "_match_tree": "params",
        "_prefetch_deadline_expired": "operation",
        "_record_dropped_tokens": "dropped_tokens reason",
        "_sync_hicache_ready_counts": "",
        "attach_storage_backend": "storage_backend",
        "check_hicache_events": "",
        "check_prefetch_progress": "request",
        "checkpoint": "req up_to",
        "checkpoint_into_tree": "req up_to",
        "claim_kv_row": "req",
        "dec_host_lock_ref": "node_id params",
        "detach_storage_backend": "",
        "discard_storage_prefetch_accounting": "request",
        "evict_host": "num_tokens component_type",
        "finish_storage_prefetch_admission": "request fulfilled_tokens reason",
        "get_last_hash_value": "node_id",
        "has_ongoing_prefetch": "handle",
        "inc_host_lock_ref": "node_id",
        "init_hicache": "server_args params",
        "init_load_back": "params",
        "is_backuped": "node_id",
        "is_root": "node_id",
        "match_prefix": "params",
        "pop_prefetch_loaded_span": "request",
        "prefetch_from_storage": (
            "request last_host_node_id new_input_tokens last_hash prefix_keys "
            "matched_prefix_tokens extra_key cache_salt storage_hit_end"
        ),
        "query_storage_hit_length": "last_host_node_id new_input_tokens",
        "release_aborted_request": "request",
        "release_host_resources": "",
        "request_buffer_backup": "node_id",
        "reset": "",
        "revoke_pending_prefetch": "request",
        "shutdown": "",
        "supports_mamba": "",
        "total_size": "",
        "write_backup_storage": "node_id",
    },
    "mem_cache.utils": {
        "get_storage_hash_str": "key prior_hash page_size",
        "storage_namespace_seed": "extra_key cache_salt",
    },
    "observability.metrics_collector": {  # ours bear its labels too (``observe``)
        "SchedulerMetricsCollector.init_new": "server_args",
    },
    "observability.req_time_stats": {
        "SchedulerReqTimeStats": (
            "trace_ctx scheduler_recv_time forward_entry_time prefill_finished_time"
        ),
    },
    "observability.trace": {
        "TraceReqContext.trace_slice": "slice",
        "TraceSliceContext": "slice_name start_time_ns end_time_ns level attrs",
        "get_global_tracing_enabled": "",
    },
    "observability.trace_async": {"TraceReqContextAsync.trace_slice": "slice_ctx"},
    "platforms.device_mixin": {
        "DeviceMixin.get_device": "",
        "DeviceMixin.is_pin_memory_available": "",
    },
    "platforms.interface:SRTPlatform": {
        "apply_server_args_defaults": "server_args",
        "get_default_attention_backend": "",
        "get_dispatch_key_name": "",
        "get_group_coordinator_device": "",
    },
    "runtime_context": {
        "describe_kv_events_publisher": "server_args",
        "get_disagg": "",
        "get_observability": "",
        "get_parallel": "",
        "get_serving": "",
    },
    "session.streaming_session": {"is_virtual_node": "node"},
    "session.streaming_session:StreamingSession": {
        "_lock_to_slot": "req slot",
        "borrowed_slot": "req",
        "find_active_slot": "req",
        "release_session": "session_id",
        "take": "req",
        "try_cache_finished_req": "req",
        "try_match_prefix": "params",
    },
    "utils.auth": {
        "decide_request_auth": "method path authorization_header api_key admin_api_key auth_level",
    },
    "utils.cudacore_pyspy_dump_utils": {"collect_scheduler_processes": ""},
}
_SIGNATURES = signatures(_SEAMS)


def check_version() -> None:
    """Raise ``ConfigError`` unless a supported SGLang is installed. Imports nothing."""
    supported = ", ".join(SUPPORTED_VERSIONS)
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"sglang is not installed; install sglang=={SUPPORTED_VERSIONS[-1]}."
        ) from None
    if installed not in (*SUPPORTED_VERSIONS, os.environ.get(CHECKED_VERSION)):
        raise ConfigError(
            f"sglang {installed} is installed, but sglang-tiered was checked against {supported} "
            f"only; install sglang=={SUPPORTED_VERSIONS[-1]}."
        )


def check_signatures(signatures: Mapping[str, tuple[str, ...]] | None = None) -> None:
    """Raise ``ConfigError`` naming the first seam that differs.

    signatures: by default those that every process relies on. A part that only some servers load
    passes its own, so that the others need not import what it extends.
    """
    for target, expected in (_SIGNATURES if signatures is None else signatures).items():
        found = parameters_of(target)
        if isinstance(found, str):
            problem = f"SGLang has no {target} ({found})"
        elif missing := [name for name in expected if name not in found]:
            takes, lacks = ", ".join(found), ", ".join(missing)
            problem = f"SGLang's {target} takes ({takes}), without {lacks}"
        else:
            continue
        raise ConfigError(f"{problem}; reinstall sglang=={SUPPORTED_VERSIONS[-1]}.")


def parameters_of(target: str) -> tuple[str, ...] | str:
    """Return the parameters of a function, of a property's getter, or of what makes a record; or
    why SGLang has no such name. Raises ``ImportError`` for a module outside SGLang that is not
    installed."""
    try:
        found: Any = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and not of_sglang(error):
            raise
        return str(error)
    fields: tuple[str, ...] | None = getattr(found, "__struct_fields__", None)
    if fields is not None:  # whose signature needs every name of its annotations
        return fields
    return tuple(inspect.signature(inspect.unwrap(getattr(found, "fget", found))).parameters)


def check_imports() -> None:
    """Raise ``ConfigError`` where what every server runs imports a name that SGLang
    lacks: SGLang only logs what its plugins raise."""
    for module in _EVERY_SERVER:
        try:
            importlib.import_module(module)
        except ImportError as error:
            if not of_sglang(error):
                raise
            raise ConfigError(
                f"SGLang lacks what {module} imports ({error}); "
                f"reinstall sglang=={SUPPORTED_VERSIONS[-1]}."
            ) from error


def of_sglang(error: ImportError) -> bool:
    """Whether an import failed at a name of SGLang, rather than at a package it requires."""
    return (error.name or "").split(".")[0] == "sglang"
