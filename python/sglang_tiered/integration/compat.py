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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import UnsupportedSGLangError

if TYPE_CHECKING:
    from collections.abc import Mapping


SUPPORTED_VERSIONS = ("0.5.23",)

CHECKED_VERSION = "CHECKED_SGLANG_VERSION"
"""Names a version that runs although it is not listed. ``scripts/compat`` sets it for the servers
that it starts to find out whether the version could be, and nothing else may."""

_CACHE = "sglang.srt.mem_cache"
_CORE = f"{_CACHE}.unified_cache.unified_tree_core_interface:UnifiedTreeCoreInterface"
_TREE = f"{_CACHE}.unified_radix_cache:UnifiedRadixCache"

_BUFFER = f"{_CACHE}.buffer_mode"
_CONTROLLER = f"{_CACHE}.hybrid_cache.hybrid_cache_controller:HybridCacheController"
_DECODE = "sglang.srt.disaggregation.decode:Decode"
_OBSERVE = "sglang.srt.observability"
_METRICS = f"{_OBSERVE}.metrics_collector"
_PLATFORMS = "sglang.srt.platforms"
_ATTENTION = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend"
_SESSION = "sglang.srt.session.streaming_session"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

_EVERY_SERVER = (
    "sglang_tiered.integration.hooks",
    "sglang_tiered.integration.cache.factory",
    "sglang_tiered.integration.cache.radix_cache",
    "sglang_tiered.integration.scheduler_messages",
    "sglang_tiered.integration.storage.backend",
)

# Every parameter that is passed by name or relied on by position, per seam.
_SIGNATURES: dict[str, tuple[str, ...]] = {
    f"{_CACHE}.registry:register_radix_cache_backend": ("name", "factory"),
    f"{_CACHE}.registry:create_unified_radix_cache": ("ctx", "cache_class"),
    f"{_CACHE}.registry:default_radix_cache_factory": ("ctx",),
    f"{_TREE}.reset": ("self",),
    f"{_TREE}.init_hicache": ("self", "server_args", "params"),
    f"{_TREE}.shutdown": ("self",),
    f"{_TREE}.total_size": ("self",),
    f"{_TREE}.attach_storage_backend": ("self", "storage_backend"),
    f"{_TREE}.detach_storage_backend": ("self",),
    f"{_TREE}.evict_host": ("self", "num_tokens", "component_type"),
    f"{_TREE}.init_load_back": ("self", "params"),
    f"{_TREE}._finish_write_through_ack": ("self", "ack_id"),
    f"{_TREE}.inc_host_lock_ref": ("self", "node_id"),
    f"{_TREE}.dec_host_lock_ref": ("self", "node_id", "params"),
    f"{_CACHE}.unified_cache.unified_tree_core_interface:UnifiedTreeCoreInterface"
    ".collect_path_info": ("self", "end_node_ids"),
    f"{_TREE}.get_last_hash_value": ("self", "node_id"),
    f"{_TREE}.prefetch_from_storage": (
        "self",
        "request",
        "last_host_node_id",
        "new_input_tokens",
        "last_hash",
        "prefix_keys",
        "matched_prefix_tokens",
        "extra_key",
        "cache_salt",
        "storage_hit_end",
    ),
    f"{_TREE}.checkpoint": ("self", "req", "up_to"),
    f"{_TREE}.supports_mamba": ("self",),
    f"{_TREE}.checkpoint_into_tree": ("self", "req", "up_to"),
    "sglang.srt.managers.schedule_batch:ReqKvInfo": ("cache_inserted_len", "kv_committed_len"),
    f"{_TREE}.is_backuped": ("self", "node_id"),
    f"{_TREE}.is_root": ("self", "node_id"),
    f"{_SESSION}:is_virtual_node": ("node",),
    f"{_SESSION}:StreamingSession.take": ("self", "req"),
    f"{_SESSION}:StreamingSession.borrowed_slot": ("self", "req"),
    f"{_SESSION}:StreamingSession.find_active_slot": ("self", "req"),
    f"{_SESSION}:StreamingSession.release_session": ("self", "session_id"),
    f"{_SESSION}:StreamingSession.try_match_prefix": ("self", "params"),
    f"{_SESSION}:StreamingSession.try_cache_finished_req": ("self", "req"),
    f"{_SESSION}:StreamingSession._lock_to_slot": ("self", "req", "slot"),
    "sglang.srt.managers.schedule_batch:Req.refresh_fill_ids": ("self",),
    "sglang.srt.managers.schedule_batch:Req.owned_kv_len": ("self",),
    f"{_TREE}._apply_cache_actions": ("self", "actions"),
    f"{_TREE}.check_prefetch_progress": ("self", "request"),
    f"{_TREE}._sync_hicache_ready_counts": ("self",),
    f"{_TREE}._all_reduce": ("self", "data", "tp_reduce_op"),
    f"{_TREE}._all_reduce_attn_groups": ("self", "tensor", "op"),
    f"{_TREE}._prefetch_deadline_expired": ("self", "operation"),
    f"{_TREE}.release_aborted_request": ("self", "request"),
    f"{_TREE}.request_buffer_backup": ("self", "node_id"),
    f"{_BUFFER}.pipeline:BufferModePipeline.is_idle": ("self",),
    f"{_BUFFER}.pipeline:BufferModePipeline.finish_backup_ack": ("self", "ack_id"),
    f"{_BUFFER}.pipeline:_UnifiedBufferBackupEntry": ("intent",),
    f"{_BUFFER}.pipeline:_UnifiedBackupIntent": ("snapshot",),
    f"{_BUFFER}.storage_existence_cache:StorageExistenceCache.clear": ("self",),
    f"{_BUFFER}.storage_existence_cache:PoolExistenceBeliefs.invalidate_beyond": (
        "self",
        "hashes",
        "keep_pages",
    ),
    f"{_TREE}.pop_prefetch_loaded_span": ("self", "request"),
    f"{_TREE}.revoke_pending_prefetch": ("self", "request"),
    f"{_TREE}.discard_storage_prefetch_accounting": ("self", "request"),
    f"{_TREE}.has_ongoing_prefetch": ("self", "handle"),
    f"{_CACHE}.storage_prefetch:StoragePrefetchRetries.refetch": (
        "self",
        "req_id",
        "storage_hit_end",
    ),
    f"{_CACHE}.storage_prefetch:StoragePrefetchRetries.pop_ready": (
        "self",
        "waiting_queue",
        "interval",
        "max_attempts",
    ),
    f"{_TREE}.claim_kv_row": ("self", "req"),
    f"{_TREE}.query_storage_hit_length": ("self", "last_host_node_id", "new_input_tokens"),
    f"{_TREE}.finish_storage_prefetch_admission": (
        "self",
        "request",
        "fulfilled_tokens",
        "reason",
    ),
    f"{_CACHE}.common:release_kv_cache": ("req", "tree_cache", "checkpoint"),
    "sglang.srt.managers.schedule_policy:PrefillAdder._select_prefill_admission": (
        "self",
        "req",
        "has_chunked_req",
    ),
    "sglang.srt.managers.schedule_policy:PrefillAdder.add_chunked_req": ("self", "req"),
    "sglang.srt.managers.schedule_policy:PrefillAdder._commit_prefill_admission": (
        "self",
        "req",
        "admission",
    ),
    "sglang.srt.managers.scheduler:Scheduler.stash_chunked_request": ("self", "req"),
    f"{_CACHE}.common:_req_radix_key": ("tree_cache", "req", "token_ids", "max_prefix_len"),
    f"{_DECODE}PreallocQueue._update_handshake_waiters": ("self",),
    f"{_DECODE}PreallocQueue._start_hicache_prefetch": ("self", "req", "prefix_match"),
    f"{_DECODE}PreallocQueue._uses_swa_tail_prealloc": ("self",),
    f"{_DECODE}PreallocQueue._swa_tail_len": ("self", "seq_len"),
    f"{_DECODE}PreallocQueue.pop_preallocated": ("self",),
    f"{_DECODE}TransferQueue.pop_transferred": ("self",),
    f"{_TREE}._drain_storage_control_queues_impl": (
        "self",
        "n_storage_hit",
        "n_ack_prefetch",
        "n_backup",
        "n_release",
        "extra_release_counts",
        "log_metrics",
    ),
    f"{_CONTROLLER}.prefetch": (
        "self",
        "handle",
        "new_input_tokens",
        "last_hash",
        "prefix_keys",
        "extra_pools",
        "assume_stored",
    ),
    f"{_CONTROLLER}._storage_hit_query": ("self", "operation"),
    f"{_CONTROLLER}.prefetch_thread_func": ("self",),
    f"{_CONTROLLER}.prefetch_io_aux_func": ("self",),
    f"{_CONTROLLER}.prefetch_sync_thread_func": ("self",),
    f"{_CONTROLLER}._sync_trailing_keys": (
        "self",
        "pool_transfers",
        "all_hashes",
        "kv_hit_pages",
    ),
    f"{_CACHE}.hybrid_cache.hybrid_cache_controller:PrefetchOperation": (
        "handle",
        "token_ids",
        "last_hash",
        "prefix_keys",
        "pool_transfers",
        "assume_stored",
    ),
    "sglang.srt.managers.cache_controller:PrefetchAck": (
        "rid",
        "operation",
        "completed_tokens",
        "pool_hits",
        "completed_req",
    ),
    f"{_CACHE}.hicache_storage:count_pool_hits": ("results",),
    f"{_CONTROLLER}.write_storage": (
        "self",
        "host_indices",
        "token_ids",
        "hash_value",
        "prefix_keys",
        "extra_pools",
    ),
    f"{_CACHE}.hybrid_cache.hybrid_cache_controller:StorageOperation": (
        "host_indices",
        "token_ids",
        "hash_value",
        "pool_transfers",
    ),
    f"{_CACHE}.hybrid_cache.hybrid_pool_assembler:HybridCacheController": ("storage_backend",),
    f"{_CONTROLLER}.backup_thread_func": ("self",),
    f"{_CONTROLLER}._resolve_sidecar_kv_derived_pool_transfers": ("self", "operation"),
    f"{_CONTROLLER}._resolve_sidecar_nonkv_derived_pool_transfers": ("self", "operation"),
    f"{_CONTROLLER}._sync_prefetch_hit_query": ("self", "operation", "storage_hit_count"),
    "sglang.srt.managers.scheduler:Scheduler.is_fully_idle": (
        "self",
        "for_health_check",
        "ignore_waiting",
    ),
    "sglang.srt.managers.scheduler:Scheduler._prefetch_kvcache": ("self", "req", "storage_hit_end"),
    f"{_OBSERVE}.req_time_stats:SchedulerReqTimeStats": (
        "trace_ctx",
        "scheduler_recv_time",
        "forward_entry_time",
        "prefill_finished_time",
    ),
    f"{_OBSERVE}.trace:TraceReqContext.trace_slice": ("self", "slice"),
    f"{_OBSERVE}.trace_async:TraceReqContextAsync.trace_slice": ("self", "slice_ctx"),
    f"{_OBSERVE}.trace:TraceSliceContext": (
        "slice_name",
        "start_time_ns",
        "end_time_ns",
        "level",
        "attrs",
    ),
    f"{_OBSERVE}.trace:get_global_tracing_enabled": (),
    "sglang.srt.managers.scheduler:Scheduler.run_batch": ("self", "batch"),
    "sglang.srt.managers.scheduler:Scheduler.process_batch_result": ("self", "batch", "result"),
    "sglang.srt.entrypoints.engine:Engine.__init__": ("self", "kwargs"),
    "sglang.srt.entrypoints.engine:Engine.shutdown": ("self",),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.abort_request": ("self", "rid"),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.pd_role_switch": (
        "self",
        "obj",
        "request",
    ),
    "sglang.srt.managers.io_struct:PdRoleSwitchReqInput": ("new_role", "prepare_only"),
    "sglang.srt.managers.io_struct:PdRoleSwitchReqOutput": (
        *("success", "message", "old_role", "new_role", "safe_to_restore"),
    ),
    "sglang.srt.managers.tokenizer_manager:ReqState": ("obj", "dispatched"),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._dispatch_to_scheduler": (
        "self",
        "obj",
    ),
    "sglang.srt.utils.cudacore_pyspy_dump_utils:collect_scheduler_processes": (),
    f"{_TREE}.write_backup_storage": ("self", "node_id"),
    f"{_TREE}.check_hicache_events": ("self",),
    f"{_TREE}._execute_and_commit_kv_backup": ("self", "action", "write_back"),
    f"{_TREE}._execute_kv_backup": ("self", "node_id", "device_value"),
    f"{_TREE}._handle_prefetch_result": ("self", "operation"),
    f"{_TREE}._drain_host_frees": ("self", "host_frees"),
    f"{_TREE}._record_dropped_tokens": ("self", "dropped_tokens", "reason"),
    f"{_CORE}.build_backup_kv_action": ("self", "node_id"),
    f"{_CORE}.get_hash_values": ("self", "node_id"),
    f"{_CORE}.get_last_hash_value": ("self", "node_id"),
    f"{_CORE}.get_prefix_hash_values": ("self", "node_id"),
    f"{_CORE}.begin_insert": ("self", "params"),
    f"{_CORE}.resume_insert": ("self",),
    f"{_CORE}.reset": ("self",),
    f"{_CACHE}.utils:storage_namespace_seed": ("extra_key", "cache_salt"),
    "sglang.srt.utils.auth:decide_request_auth": (
        "method",
        "path",
        "authorization_header",
        "api_key",
        "admin_api_key",
        "auth_level",
    ),
    "sglang.srt.runtime_context:describe_kv_events_publisher": ("server_args",),
    "sglang.srt.disaggregation.kv_events:uses_dynamo_format": ("kv_events_config",),
    f"{_CORE}.is_backuped": ("self", "node_id"),
    f"{_CACHE}.utils:get_storage_hash_str": ("key", "prior_hash", "page_size"),
    f"{_CACHE}.hicache_storage:HiCacheStorage.batch_exists_v2": (
        "self",
        "keys",
        "pool_transfers",
        "extra_info",
    ),
    f"{_CACHE}.hicache_storage:HiCacheStorage.on_host_pools_registered": ("self",),
    "sglang.srt.distributed.parallel_state:GroupCoordinator.all_gather_object": ("self", "obj"),
    "sglang.srt.layers.attention.attention_registry:register_attention_backend": ("name",),
    f"{_CACHE}.pool_host.base:HostKVCache.__init__": ("self", "host_size", "pin_memory"),
    f"{_CACHE}.pool_host.base:host_memory_budget_bytes": ("requested_bytes", "auto_size"),
    f"{_CACHE}.host_memory:available_host_memory_bytes": ("allow_cgroup_fallback",),
    f"{_CACHE}.pool_host.base:ranks_per_host": (),
    f"{_CACHE}.hicache_auto_size:_estimate_hicache_bytes": ("params", "draft_plan"),
    f"{_CACHE}.kv_cache_builder:auto_size_hicache": ("params", "draft_plan", "enabled"),
    f"{_CACHE}.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes": (
        "self",
        "pre_model_load_memory",
    ),
    f"{_CACHE}.kv_cache_configurator:get_available_gpu_memory": (
        "device",
        "gpu_id",
        "distributed",
        "cpu_group",
    ),
    "sglang.srt.configs.model_config:_get_and_verify_dtype": ("config", "dtype"),
    "sglang.srt.entrypoints.engine:_scheduler_died_error": ("rank", "proc"),
    "sglang.srt.entrypoints.engine:Engine._launch_scheduler_processes": (
        "server_args",
        "port_args",
        "run_scheduler_process_func",
        "placement_group",
    ),
    "sglang.srt.entrypoints.engine:Engine._launch_detokenizer_subprocesses": (
        "server_args",
        "port_args",
        "run_detokenizer_process_func",
    ),
    "sglang.srt.arg_groups.fields.model:Model": (  # every field of which is in the namespace
        "model_path",
        "revision",
        "download_dir",
        "load_format",
        "model_loader_extra_config",
        "quantization",
        "kv_cache_dtype",
        "weight_cache_mode",
    ),
    "sglang.srt.managers.scheduler:Scheduler.__init__": ("self", "server_args"),
    "sglang.srt.managers.scheduler:Scheduler.get_init_info": ("self",),
    "sglang.srt.managers.data_parallel_controller:DataParallelController.get_init_info": ("self",),
    "sglang.srt.managers.scheduler:Scheduler.init_request_dispatcher": ("self",),
    "sglang.srt.managers.scheduler:Scheduler.flush_cache": ("self", "empty_cache"),
    "sglang.srt.managers.scheduler:Scheduler.on_idle": ("self",),
    "sglang.srt.managers.scheduler:Scheduler._record_scheduler_state_for_paused_engine": ("self",),
    "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.dumper_control": (
        "self",
        "obj",
    ),
    "sglang.srt.managers.schedule_batch:Req.__init__": (
        "self",
        "lora_id",
        "extra_key",
        "cache_salt",
    ),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._create_tokenized_object": (
        "self",
        "obj",
        "input_text",
        "input_ids",
    ),
    "sglang.srt.managers.io_struct:GenerateReqInput.normalize_batch_and_arguments": ("self",),
    "sglang.srt.managers.io_struct:GenerateReqInput": (
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        *("lora_path", "image_data", "video_data", "audio_data"),
    ),
    "sglang.srt.managers.kv_hints:KvHintsEnvelope": ("protocol_version", "message_id", "actions"),
    "sglang.srt.managers.kv_hints:KvHintAction": (
        "action_id",
        "action_type",
        "action_version",
        "payload",
    ),
    "sglang.srt.entrypoints.request_headers:apply_header_overrides": ("obj", "headers"),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request": (
        "self",
        "obj",
        "request",
    ),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._tokenize_one_request": (
        "self",
        "obj",
    ),
    # The labels of SGLang's own metrics, which ours bear too (``observe.exporter``).
    f"{_METRICS}:SchedulerMetricsCollector.init_new": ("server_args",),
    "sglang.srt.disaggregation.utils:DisaggregationMode.to_engine_type": ("mode",),
    "sglang.srt.runtime_context:get_parallel": (),
    "sglang.srt.runtime_context:get_serving": (),
    "sglang.srt.runtime_context:get_disagg": (),
    "sglang.srt.runtime_context:get_observability": (),
    f"{_CORE}.prefetch_anchor_info": ("self", "node_id"),
    f"{_CORE}.build_hicache_transfers": (
        "self",
        "component_type",
        "node_id",
        "phase",
        "prefetch_tokens",
        "staging_tokens",
    ),
    f"{_CACHE}.unified_cache.components.base:TreeComponent.prepare_prefetch": (
        "self",
        "node_id",
        "prefetch_tokens",
    ),
    # Overrides: a method that SGLang no longer calls would be dropped without a word.
    f"{_TREE}.match_prefix": ("self", "params"),
    f"{_TREE}._match_tree": ("self", "params"),
    f"{_TREE}.release_host_resources": ("self",),
    **{
        f"{_CACHE}.hicache_storage:HiCacheStorage.{method}": parameters
        for method, parameters in {
            "get": ("self", "key", "target_location", "target_sizes"),
            "batch_get": ("self", "keys", "target_locations", "target_sizes"),
            "set": ("self", "key", "value", "target_location", "target_sizes"),
            "batch_set": ("self", "keys", "values", "target_locations", "target_sizes"),
            "exists": ("self", "key"),
            "batch_exists": ("self", "keys", "extra_info"),
        }.items()
    },
    f"{_ATTENTION}.init_forward_metadata": ("self", "forward_batch"),
    f"{_ATTENTION}.forward_extend": ("self", "q", "k", "v", "layer", "forward_batch"),
    f"{_ATTENTION}.forward_decode": ("self", "q", "k", "v", "layer", "forward_batch"),
    f"{_PLATFORMS}.device_mixin:DeviceMixin.get_device": ("self",),
    f"{_PLATFORMS}.device_mixin:DeviceMixin.is_pin_memory_available": ("self",),
    f"{_PLATFORMS}.interface:SRTPlatform.apply_server_args_defaults": ("self", "server_args"),
    f"{_PLATFORMS}.interface:SRTPlatform.get_default_attention_backend": ("self",),
    f"{_PLATFORMS}.interface:SRTPlatform.get_dispatch_key_name": ("self",),
    f"{_PLATFORMS}.interface:SRTPlatform.get_group_coordinator_device": ("self",),
    # Fields that 0.5.22 lacked.
    f"{_CACHE}.cache_init_params:CacheInitParams": ("sidecar_draft_device_pools",),
    f"{_CACHE}.hicache_storage:HiCacheStorageConfig": (
        "dcp_rank",
        "dcp_size",
        "logical_page_size",
    ),
    # The rest of what is hooked.
    "sglang.srt.disaggregation.utils:get_kv_class": ("transfer_backend", "class_type"),
    "sglang.srt.disaggregation.utils:prepare_abort": ("req", "error_message", "status_code"),
    f"{_DECODE}PreallocQueue.__init__": ("self", "scheduler"),
    f"{_DECODE}PreallocQueue._create_receiver_and_enqueue": ("self", "req", "is_rebootstrap"),
    "sglang.srt.disaggregation.prefill:PrefillBootstrapQueue.create_sender": ("self", "req"),
    f"{_UPDATER}.flush_cache_after_weight_update": ("self", "recv_req", "success", "message"),
}


@dataclass(frozen=True)
class Difference:
    """A seam that is not as it was checked. ``found``: its parameters, None where SGLang has no
    such name; ``reason`` says why then."""

    target: str
    expected: tuple[str, ...]
    found: tuple[str, ...] | None
    reason: str = ""

    def __str__(self) -> str:
        if self.found is None:
            return f"SGLang has no {self.target} ({self.reason})"
        missing = ", ".join(name for name in self.expected if name not in self.found)
        return f"SGLang's {self.target} takes ({', '.join(self.found)}), without {missing}"


def check_version() -> None:
    """Raise ``UnsupportedSGLangError`` unless a supported SGLang is installed. Imports nothing."""
    supported = ", ".join(SUPPORTED_VERSIONS)
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedSGLangError(
            f"sglang is not installed; install sglang=={SUPPORTED_VERSIONS[-1]}."
        ) from None
    if installed not in (*SUPPORTED_VERSIONS, os.environ.get(CHECKED_VERSION)):
        raise UnsupportedSGLangError(
            f"sglang {installed} is installed, but sglang-tiered was checked against {supported} "
            f"only; install sglang=={SUPPORTED_VERSIONS[-1]}."
        )


def check_signatures(signatures: Mapping[str, tuple[str, ...]] | None = None) -> None:
    """Raise ``UnsupportedSGLangError`` naming the first seam that differs.

    signatures: by default those that every process relies on. A part that only some servers load
    passes its own, so that the others need not import what it extends.
    """
    for target, expected in (_SIGNATURES if signatures is None else signatures).items():
        found = difference(target, expected)
        if found is not None:
            raise UnsupportedSGLangError(f"{found}; reinstall sglang=={SUPPORTED_VERSIONS[-1]}.")


def difference(target: str, expected: tuple[str, ...]) -> Difference | None:
    """Compare one seam. A module outside SGLang that is not installed raises ``ImportError``."""
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and not of_sglang(error):
            raise
        return Difference(target, expected, None, str(error))
    parameters = _parameters(function)
    if all(name in parameters for name in expected):
        return None
    return Difference(target, expected, parameters)


def _parameters(found: Any) -> tuple[str, ...]:
    """The parameters of a function, of a property's getter, or of what makes a record."""
    fields: tuple[str, ...] | None = getattr(found, "__struct_fields__", None)
    if fields is not None:  # whose signature needs every name of its annotations
        return fields
    return tuple(inspect.signature(inspect.unwrap(getattr(found, "fget", found))).parameters)


def check_imports() -> None:
    """Raise ``UnsupportedSGLangError`` where what every server runs imports a name that SGLang
    lacks: SGLang only logs what its plugins raise."""
    for module in _EVERY_SERVER:
        try:
            importlib.import_module(module)
        except ImportError as error:
            if not of_sglang(error):
                raise
            raise UnsupportedSGLangError(
                f"SGLang lacks what {module} imports ({error}); "
                f"reinstall sglang=={SUPPORTED_VERSIONS[-1]}."
            ) from error


def of_sglang(error: ImportError) -> bool:
    """Whether an import failed at a name of SGLang, rather than at a package it requires."""
    return (error.name or "").split(".")[0] == "sglang"
