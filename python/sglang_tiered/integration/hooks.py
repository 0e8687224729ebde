"""Every hook into SGLang where it has no seam, each with its reason. For SGLang 0.5.23.

| target | kind | reason |
|---|---|---|
| SchedulerWeightUpdaterManager.update_weights_from_{disk,distributed,tensor,ipc}, begin_weight_update and end_weight_update | AFTER | weights replaced in a running server make every stored page stale; SGLang flushes the tree (if asked) but never the storage (sglang issues 24758, 26792); what is handed over is named anew |
| SchedulerWeightUpdaterManager.update_weights_from_{disk,distributed,tensor,ipc} | BEFORE | with stores under way SGLang refuses the flush, and old KV stays in memory under new weights |
| SchedulerWeightUpdaterManager.release_memory_occupation | AROUND | SGLang ends the scheduler while stores are under way; and released weights come back as garbage, whose KV must not be stored under their namespace |
| SchedulerWeightUpdaterManager.resume_memory_occupation | AROUND | SGLang ends the scheduler when asked to resume what was not released, as after a disk that hung |
| Scheduler._record_scheduler_state_for_paused_engine | AFTER | while generation is paused, SGLang ignores stores that end, and would refuse a flush until it resumes |
| Scheduler.run_batch, Scheduler.process_batch_result | AROUND | the cost model learns from the duration of prefills, which SGLang does not report to the cache |
| Scheduler.is_fully_idle | AFTER | an abandoned load may still be reading while SGLang counts itself idle; ``/flush_cache`` then ends the scheduler, because its storage threads do not stop (``quiescing``) |
| Scheduler.get_internal_state | AFTER | ``/server_info`` shows the tiers without ``--enable-metrics``, and the counters of the ``pod`` attention backend |
| Scheduler.handle_dumper_control | AROUND | SGLang's control message with free content reaches every rank; those of the tiers are answered, all others are passed on |
| Scheduler.__init__ | AFTER | the cache does not know its scheduler, whose queue it must reach when another server purges a tenant |
| Scheduler.__init__ | AROUND | a configuration refused once pools are sized ends the process with one sentence and code 2; SGLang prints a traceback |
| entrypoints.engine._scheduler_died_error | AFTER | the launcher learns that the scheduler refused, and prints nothing more |
| Engine._launch_scheduler_processes, Engine._launch_detokenizer_subprocesses | AROUND, CPU only | SGLang spawns its processes, which import it again each; the launcher's are forks (``cpu.processes``) |
| Scheduler.get_init_info, DataParallelController.get_init_info | AFTER | the launcher's banner shows what the tiers hold, which only the scheduler knows |
| pool_host.base.ranks_per_host | AROUND | SGLang does not count the replicas of ``--dp-size`` among those that share the machine's memory |
| kv_cache_builder.auto_size_hicache | AROUND | SGLang raises, or makes a host tier of a few tokens, where hardly any memory is left |
| KVCacheConfigurator._profile_available_bytes | AROUND, CPU only | SGLang gives the device pool most of the machine's memory, which the host tier needs too (``cpu.memory``) |
| configs.model_config._get_and_verify_dtype | AROUND, CPU only | SGLang makes float16 of a float32 checkpoint, which a CPU computes slowest of all formats (``cpu.number_format``) |
| Scheduler.flush_cache | AFTER | a flush releases purged tenants, and prefill hands KV over again that may have been of weights before |
| SchedulerFlushWrapper.handle, Scheduler.detach_hicache_storage_wrapped | BEFORE | both need an idle scheduler; hints that load for no request would keep it busy |
| Scheduler.clear_hicache_storage_wrapped | AROUND | ``POST /hicache/storage-backend/clear`` must empty memory only; ``/tier/purge`` alone removes what NVMe, the bucket and other servers hold |
| Scheduler.on_idle | AFTER | nodes that a purge left in the tree are removed when no request uses them; SGLang's tree cannot remove one tenant |
| Scheduler.on_idle | BEFORE | the last record of ``/tier/costs`` must not show work while the scheduler rests |
| Scheduler.on_idle | AFTER, CPU only | a scheduler that waits for a handoff polls without a pause, on the cores that the other instance computes on |
| mem_cache.utils.storage_namespace_seed | AROUND | the other key of a purged tenant's requests separates nodes in the tree only; every tier knows a page by one hash |
| Req.__init__ | AFTER | requests of a purged tenant must not match nodes still in the tree; SGLang appends the id of a LoRA adapter to ``extra_key``, so a user's key could name an adapter's pages |
| utils.auth.decide_request_auth | AROUND | ``GET /tier/costs`` takes a key that opens nothing else, so that whoever a router takes for a server learns none that does |
| TokenizerManager.generate_request | BEFORE | endpoints of Anthropic's and Ollama's API drop ``cache_salt``, ``session_id`` and ids; those that cannot take a salt ignore it; ``/v1/completions`` and others ignore what a gateway says in headers (``named_in_body``) |
| TokenizerManager._tokenize_one_request | BEFORE | a client may send hashes of its images, and so store one image's pages under another's key (``media_hashes``) |
| TokenizerManager._create_tokenized_object | AFTER | SGLang does not hand a request's ``conversation_id`` to the schedulers, which pin, list and forget by it (``conversation_ids``) |
| GenerateReqInput.normalize_batch_and_arguments | AFTER | SGLang ends both schedulers where a client gives a list for the room of one prompt, and answers 500 where the list is too short (``request_rooms``) |
| TokenizerManager._create_tokenized_object, TokenizerManager.{_send_one_request, _send_batch_request} | AFTER, BEFORE | SGLang gives every sample of ``n`` the same room, and takes a number that two clients draw for one request's |
| SchedulerWeightUpdaterManager.flush_cache_after_weight_update | AFTER | a refused flush fails the update's answer, which then does not tell whether all weights are there |
| disaggregation.utils.get_kv_class | AROUND | SGLang's table of transfer backends is closed; ``zmq`` is answered here, all others are passed on |
| Scheduler.{load_lora_adapter, load_lora_adapter_from_tensors, unload_lora_adapter} | AFTER | an adapter that was loaded while the server runs is part of what KV means, and has another id on every server |
| PrefillBootstrapQueue.create_sender, DecodePreallocQueue._create_receiver_and_enqueue | BEFORE | SGLang does not tell the ends of a handoff which adapter and tokens its request has |
| disaggregation.utils.prepare_abort | BEFORE | a handoff between servers of unequal models is answered with 503, not 500: another pair may serve the request |
| disaggregation.utils.TransferBackend | member | the enum of their names is closed too |
| DecodePreallocQueue.__init__ | AFTER | it looks for a prefill server once a second, on the scheduler's thread; for ``zmq`` a thread looks, and the queue asks often for its answer. The same holds for the replica of ``--dp-size`` that has a request (``CommonKVReceiver.query_prefill_dp_ranks``, which has no access to the manager that knows) |
| DecodePreallocQueue.{_update_handshake_waiters, _start_hicache_prefetch, pop_preallocated}, DecodeTransferQueue.pop_transferred | AFTER | SGLang promises prefill the pages that storage holds before they are loaded, and fails the request when fewer arrive; ``decode_loads`` loads first |
| Scheduler._prefetch_kvcache | BEFORE | what is noted of a request begins here (``observe.requests``); with priorities, requests and their loads go first that have a higher one, of which SGLang tells the cache nothing |
| PrefillAdder.{_select_prefill_admission, add_chunked_req} | AROUND | a chunk of a front ends where it is expected to meet its back, which SGLang knows no reason for; and then nobody else may be chunked in the same batch (``cache.yielding``) |
| PrefillAdder._commit_prefill_admission, Scheduler.stash_chunked_request | AFTER | a request whose back has arrived gives its row back at a chunk boundary: SGLang matches a chunked request against the tree no more |
| Scheduler._prefetch_kvcache | BEFORE | which requests may be computed in chunks of ours, of which the cache hears nothing |
| HybridCacheController.prefetch | AROUND | SGLang asks a storage on a thread, and begins the load a step later; the index of the tiers is in memory, and was just asked (``PlannedHits``) |
| HybridCacheController._page_transfer | AROUND | SGLang's thread reads one load at a time, 128 pages a call, and lets an aborted load's pages go when it is through with it (``ReadAhead``) |
| HybridCacheController._page_backup | AROUND | SGLang's thread stores one pool of one node at a time, and 128 pages a call (``StoreAhead``) |
| HybridCacheController.backup_thread_func | AROUND | what was begun of stores that the thread will not come to must end before it does |
| log filter on managers.cache_controller | - | SGLang logs a warning per failed page or batch; a full disk would fill the log |
"""  # noqa: E501

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from sglang_tiered.errors import ConfigError, SchedulerRefused, TieredError
from sglang_tiered.integration.cache import host_size, yielding
from sglang_tiered.integration.cache.timing.prefill_timer import PrefillClock
from sglang_tiered.integration.cpu import memory, number_format, processes
from sglang_tiered.integration.disaggregation import registration
from sglang_tiered.integration.identity import conversation_ids, named_in_body, namespace
from sglang_tiered.integration.identity.media_hashes import (
    drop_client_hashes,
    refuse_placeholder_tokens,
)
from sglang_tiered.integration.names import TRANSFER_BACKEND
from sglang_tiered.metrics import METRICS, TRANSFER_METRICS

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.disaggregation.handed_model import WeightUpdate

__all__ = ["RepeatFilter", "register"]

_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_REQUEST = "sglang.srt.managers.io_struct.GenerateReqInput"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_FLUSHES = "sglang.srt.managers.scheduler_components.flush_wrapper"
_WEIGHT_UPDATES = ("update_weights_from_disk", "update_weights_from_ipc")
_SESSION_UPDATES = (
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "end_weight_update",
)
REFUSED = 2
"""Exit code of a scheduler that has printed why it refuses to start."""
TIERS_INFO = "sglang_tiered_tiers"
"""Key of what the tiers hold in a scheduler's start message."""

LOOKUP_LOOK_S = 0.01

logger = logging.getLogger(__name__)

_REPEATED_MESSAGES = ("Write page to storage:", "Prefetch operation ")
REPEAT_INTERVAL_S = 60.0


def register() -> None:
    """Register the hooks; SGLang applies them after all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method in _WEIGHT_UPDATES:
        HookRegistry.register(f"{_UPDATER}.{method}", _after_weight_update, HookType.AFTER)
    for method in _SESSION_UPDATES:
        HookRegistry.register(f"{_UPDATER}.{method}", _after_session_update, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.begin_weight_update", _after_begin, HookType.AFTER)
    HookRegistry.register(
        f"{_UPDATER}.flush_cache_after_weight_update", _after_flush_of_update, HookType.AFTER
    )
    for method in (*_WEIGHT_UPDATES, *_SESSION_UPDATES[:2]):
        HookRegistry.register(f"{_UPDATER}.{method}", _before_weight_update, HookType.BEFORE)
    HookRegistry.register(f"{_UPDATER}.release_memory_occupation", _around_release, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.resume_memory_occupation", _around_resume, HookType.AROUND)
    HookRegistry.register(
        f"{_SCHEDULER}._record_scheduler_state_for_paused_engine", _after_pause, HookType.AFTER
    )
    clock = PrefillClock()
    HookRegistry.register(f"{_SCHEDULER}.run_batch", clock.around_run, HookType.AROUND)
    HookRegistry.register(
        f"{_SCHEDULER}.process_batch_result", clock.around_result, HookType.AROUND
    )
    HookRegistry.register(f"{_SCHEDULER}._prefetch_kvcache", _before_prefetch, HookType.BEFORE)
    yielding.register()
    HookRegistry.register(f"{_SCHEDULER}.is_fully_idle", _after_is_fully_idle, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.get_internal_state", _after_internal_state, HookType.AFTER)
    for method, around in {
        "prefetch": _around_prefetch,
        "_page_transfer": _around_page_transfer,
        "_page_backup": _around_page_backup,
        "backup_thread_func": _around_backup_thread,
    }.items():
        HookRegistry.register(f"{_CONTROLLER}.{method}", around, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.__init__", _around_scheduler, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.get_init_info", _after_init_info, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info",
        _after_controller_info,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.base.ranks_per_host",
        host_size.around_ranks_per_host,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.entrypoints.engine._scheduler_died_error", _after_scheduler_died, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.kv_cache_builder.auto_size_hicache",
        host_size.around_auto_size,
        HookType.AROUND,
    )
    if not torch.accelerator.is_available():
        HookRegistry.register(
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
            "._profile_available_bytes",
            memory.around_profile,
            HookType.AROUND,
        )
        HookRegistry.register(
            "sglang.srt.configs.model_config._get_and_verify_dtype",
            number_format.around_dtype,
            HookType.AROUND,
        )
        HookRegistry.register(f"{_SCHEDULER}.on_idle", _rest_on_idle, HookType.AFTER)
        for starts in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"):
            HookRegistry.register(
                f"sglang.srt.entrypoints.engine.Engine.{starts}",
                processes.around_start,
                HookType.AROUND,
            )
    HookRegistry.register(f"{_TOKENIZER}.generate_request", _before_generating, HookType.BEFORE)
    HookRegistry.register(
        f"{_TOKENIZER}._tokenize_one_request", _before_tokenizing, HookType.BEFORE
    )
    HookRegistry.register(
        f"{_TOKENIZER}._create_tokenized_object", conversation_ids.after_tokenizing, HookType.AFTER
    )
    _register_control()
    _register_transfer_backend()
    _register_decode_loads()
    target = logging.getLogger("sglang.srt.managers.cache_controller")
    if not any(isinstance(existing, RepeatFilter) for existing in target.filters):
        target.addFilter(RepeatFilter(_REPEATED_MESSAGES))


def _register_control() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_tiered.integration.admin.control import Control
    from sglang_tiered.integration.admin.keys import around_auth
    from sglang_tiered.integration.identity import tenants

    control, request = Control(), "sglang.srt.managers.schedule_batch.Req"
    utils = "sglang.srt.mem_cache.utils"
    for target, hook, kind in (
        (f"{utils}.storage_namespace_seed", tenants.around_seed, HookType.AROUND),
        ("sglang.srt.utils.auth.decide_request_auth", around_auth, HookType.AROUND),
        (f"{_SCHEDULER}.__init__", control.after_scheduler, HookType.AFTER),
        (f"{_SCHEDULER}.handle_dumper_control", control.around_message, HookType.AROUND),
        (f"{_SCHEDULER}.flush_cache", control.after_flush, HookType.AFTER),
        (f"{_FLUSHES}.SchedulerFlushWrapper.handle", control.before_rest, HookType.BEFORE),
        (f"{_SCHEDULER}.detach_hicache_storage_wrapped", control.before_rest, HookType.BEFORE),
        (f"{_SCHEDULER}.clear_hicache_storage_wrapped", control.around_clear, HookType.AROUND),
        (f"{_SCHEDULER}.on_idle", control.before_idle, HookType.BEFORE),
        (f"{_SCHEDULER}.on_idle", control.after_idle, HookType.AFTER),
        (f"{request}.__init__", control.after_request, HookType.AFTER),
    ):
        HookRegistry.register(target, hook, kind)


def _register_transfer_backend() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_tiered.integration.disaggregation import request_rooms

    name, backends = TRANSFER_BACKEND, utils.TransferBackend
    if name not in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        choices.add_disagg_transfer_backend_choices([name])
    if name not in backends._value2member_map_:  # noqa: SLF001
        member = object.__new__(backends)
        member._name_, member._value_ = name.upper(), name  # noqa: SLF001
        member.__objclass__ = backends
        member._sort_order_ = len(backends._member_names_)  # noqa: SLF001
        type.__setattr__(backends, name.upper(), member)  # Enum refuses the plain assignment
        backends._member_map_[name.upper()] = member  # noqa: SLF001
        backends._value2member_map_[name] = member  # noqa: SLF001
        backends._member_names_.append(name.upper())  # noqa: SLF001
    disaggregation = "sglang.srt.disaggregation"
    queue = f"{disaggregation}.decode.DecodePreallocQueue"
    for target, hook, kind in (
        (f"{disaggregation}.utils.get_kv_class", _around_get_kv_class, HookType.AROUND),
        (f"{queue}.__init__", _after_decode_queue, HookType.AFTER),
        (f"{_REQUEST}.normalize_batch_and_arguments", request_rooms.check_rooms, HookType.AFTER),
        (f"{_TOKENIZER}._create_tokenized_object", request_rooms.after_tokenizing, HookType.AFTER),
        (f"{_TOKENIZER}._send_one_request", request_rooms.before_sending, HookType.BEFORE),
        (f"{_TOKENIZER}._send_batch_request", request_rooms.before_batch, HookType.BEFORE),
    ):
        HookRegistry.register(target, hook, kind)
    registration.register()


def _register_decode_loads() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_tiered.integration.disaggregation import decode_loads

    for method, hook in {
        "DecodePreallocQueue._update_handshake_waiters": decode_loads.after_handshakes,
        "DecodePreallocQueue._start_hicache_prefetch": decode_loads.after_match,
        "DecodePreallocQueue.pop_preallocated": decode_loads.after_preallocation,
        "DecodeTransferQueue.pop_transferred": decode_loads.after_transfers,
    }.items():
        HookRegistry.register(f"sglang.srt.disaggregation.decode.{method}", hook, HookType.AFTER)


def _around_prefetch(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    from sglang_tiered.integration.cache.planned_hits import around_prefetch

    return around_prefetch(original, *arguments, **named)


def _around_page_transfer(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    reads = getattr(controller.storage_backend, "reads", None)  # of the tiers alone
    if reads is None:
        return original(controller, operation)
    return reads.carry_out(original, controller, operation)


def _around_page_backup(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    stores = getattr(controller.storage_backend, "stores", None)
    if stores is None:
        return original(controller, operation)
    return stores.carry_out(original, controller, operation)


def _around_backup_thread(original: Callable[..., Any], controller: Any) -> None:
    try:
        original(controller)
    finally:
        stores = getattr(controller.storage_backend, "stores", None)
        if stores is not None:
            stores.finish()


def _around_get_kv_class(original: Callable[..., Any], backend: Any, class_type: Any) -> Any:
    if backend.value != TRANSFER_BACKEND or class_type.value == "kvargs":
        return original(backend, class_type)
    from sglang_tiered.integration.disaggregation import manager as kv_transfer

    return kv_transfer.CLASSES[class_type.value]


def _after_decode_queue(_: Any, queue: Any, *__: Any, **___: Any) -> None:
    if queue.transfer_backend.value == TRANSFER_BACKEND:
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        from sglang_tiered.integration.disaggregation.bootstrap_client import LOOKUP_DEADLINE_S

        client = queue.kv_manager.bootstrap_client
        CommonKVReceiver.query_prefill_dp_ranks = staticmethod(client.replicas_of)
        queue._ensure_retry_interval = LOOKUP_LOOK_S  # noqa: SLF001
        queue._max_ensure_retries = round(LOOKUP_DEADLINE_S / LOOKUP_LOOK_S)  # noqa: SLF001


def _cache_of(scheduler: Any) -> TieredRadixCache | None:
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache

    cache = getattr(scheduler, "tree_cache", None)
    return cache if isinstance(cache, TieredRadixCache) else None


def _before_prefetch(scheduler: Any, req: Any, *_: Any) -> None:
    from sglang.srt.runtime_context import get_memory

    cache = _cache_of(scheduler)
    if cache is None or cache.tiering is None:
        return
    cache.tiering.notes.arrives(scheduler, req)
    cache.tiering.loads.comes(req, get_memory().hicache_storage_prefetch_retry_max_attempts)
    if scheduler.enable_priority_scheduling:
        rank = scheduler.policy.priority_sign * (req.priority or 0)
        cache.tiering.loads.ranks(req.cache_request_handle, rank)


def _before_weight_update(updater: Any, recv_req: Any) -> None:
    cache = _cache_of(updater.scheduler)
    if cache is not None and recv_req.flush_cache:
        cache.quiesce()


def _after_weight_update(result: Any, updater: Any, recv_req: Any) -> None:
    """Treat a failed update as an update too: it may have replaced some weights."""
    wants_flush = bool(getattr(recv_req, "flush_cache", False))
    _weights_changed(updater, _update_of(result, updater, recv_req), wants_flush=wants_flush)


def _after_flush_of_update(_: Any, updater: Any, recv_req: Any, success: bool, *__: Any) -> None:
    updater.scheduler.tiered_update = recv_req, success


def _update_of(result: Any, updater: Any, recv_req: Any) -> WeightUpdate:
    from sglang_tiered.integration.disaggregation.handed_model import WeightUpdate

    # A refused flush fails the call, though all weights are there.
    flushed_of, was_loaded = getattr(updater.scheduler, "tiered_update", (None, False))
    is_loaded = result.success or (flushed_of is recv_req and was_loaded)
    return WeightUpdate(
        getattr(recv_req, "model_path", None),
        getattr(recv_req, "load_format", None),
        is_complete=is_loaded and updater._session is None,  # noqa: SLF001
    )


def _after_session_update(result: Any, updater: Any, recv_req: Any) -> None:
    if not (result.success or updater._session is not None):  # noqa: SLF001
        return  # it was refused
    cache, wants_flush = _cache_of(updater.scheduler), getattr(recv_req, "flush_cache", None)
    if cache is not None:
        # The call that ends a session has no such field: it goes by the others of the session.
        cache.session_flushes = cache.session_flushes or bool(wants_flush)
        wants_flush = cache.session_flushes if wants_flush is None else wants_flush
    update = _update_of(result, updater, recv_req)
    _weights_changed(updater, update, wants_flush=bool(wants_flush))


def _after_begin(result: Any, updater: Any, *_: Any) -> None:
    """Expect weights to change without a call from now on, for example by RDMA."""
    cache = _cache_of(updater.scheduler)
    if result.success:
        if cache is not None:
            cache.session_flushes = False
        _weights_will_change(updater)


def _weights_will_change(updater: Any) -> None:
    from sglang_tiered.integration.disaggregation.handed_model import WeightUpdate

    _weights_changed(updater, WeightUpdate(), are_final=False)


def _weights_changed(
    updater: Any, update: WeightUpdate, *, wants_flush: bool = False, are_final: bool = True
) -> None:
    from sglang_tiered.integration.observe.transfer_stats import manager_of

    scheduler = updater.scheduler
    cache, handoff = _cache_of(scheduler), manager_of(scheduler)
    # What is left in memory counts, not what the call asked for: the last call of a session flushes
    # nothing, and a flush may have been refused, by a single rank whose load failed.
    is_idle = scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused)  # noqa: SLF001
    if cache is None:
        if handoff is not None:
            namespace.drop_digests()
            is_clean = are_final and is_idle and not _holds_kv(scheduler.tree_cache)
            handoff.weights_changed(update, memory_is_clean=is_clean)
        return
    from sglang_tiered.integration.admin.control import hide_memory
    from sglang_tiered.integration.ranks.rank_consensus import least_on_every_rank

    (is_empty,) = least_on_every_rank(cache, [int(is_idle and cache.is_empty)])
    hides = wants_flush and not is_empty
    if hides:
        logger.warning(
            "memory was not flushed after the change of weights (requests run or a disk hangs); "
            "no request that comes now matches the old pages, and no tier takes them"
        )
        hide_memory(scheduler)
    cache.change_weights(tree_is_empty=are_final and bool(is_empty or hides))
    if handoff is not None:
        is_clean = are_final and bool(is_empty or hides)
        handoff.weights_changed(update, memory_is_clean=is_clean)


def _holds_kv(tree: Any) -> bool:
    """Whether a tree of SGLang's own holds any KV."""
    try:
        held = tree.total_size()
    except NotImplementedError:  # without a prefix cache
        return False
    return any(held if isinstance(held, tuple) else (held,))


def _around_release(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput
    from sglang.srt.runtime_context import get_exec

    cache = _cache_of(updater.scheduler)
    if cache is not None and not cache.quiesce():
        logger.error(
            "no memory was released (the disk of the NVMe tier hangs and may still write to host "
            "memory); release it again once the disk answers"
        )
        return ReleaseMemoryOccupationReqOutput()
    result = original(updater, recv_req)
    of_weights = not recv_req.tags or GPU_MEMORY_TYPE_WEIGHTS in recv_req.tags
    are_kept = get_exec().features.enable_weights_cpu_backup
    if of_weights and updater.memory_saver_adapter.enabled and not are_kept:
        _weights_will_change(updater)
    return result


def _around_resume(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    if _cache_of(updater.scheduler) is not None:
        asked = recv_req.tags or GPU_MEMORY_ALL_TYPES
        recv_req.tags = [tag for tag in asked if tag in updater.offload_tags]
        if not recv_req.tags:
            return ResumeMemoryOccupationReqOutput()
    return original(updater, recv_req)


def _after_pause(_: Any, scheduler: Any) -> None:
    """Do the cache's part of the step that SGLang skips; all ranks are in the same step."""
    cache = _cache_of(scheduler)
    if cache is not None:
        cache.check_hicache_events()


def _after_is_fully_idle(
    result: bool, scheduler: Any, for_health_check: bool = False, ignore_waiting: bool = False
) -> bool:
    cache = _cache_of(scheduler)
    if not result or for_health_check or cache is None:
        return result
    return not cache.has_loads_under_way


def _after_internal_state(result: Any, scheduler: Any, recv_req: Any) -> Any:
    from sglang_tiered.integration.attention.pod import PodAttention
    from sglang_tiered.integration.observe.holdings import holdings
    from sglang_tiered.integration.observe.samples import state_of
    from sglang_tiered.integration.observe.transfer_stats import stats_of_scheduler

    transfer = stats_of_scheduler(scheduler)
    if transfer is not None:
        result.internal_state["sglang_tiered_transfer"] = state_of(TRANSFER_METRICS, transfer)
    if PodAttention.statistics.serving:
        result.internal_state["sglang_tiered_pod"] = PodAttention.statistics.state()
    cache = _cache_of(scheduler)
    if cache is None:
        return result
    state: dict[str, Any] = {"tiers": holdings(cache)}
    if cache.storage is not None:
        stats = cache.process_stats()
        state |= state_of(METRICS, stats)
        for name, reason in stats.health_reasons().items():
            state[f"tier_unhealthy_because:{name}"] = reason
    if cache.tiering is not None and cache.tiering.costs is not None:
        state["costs"] = msgspec.to_builtins(cache.tiering.costs.take())
    result.internal_state["sglang_tiered"] = state
    return result


def _around_scheduler(
    original: Callable[..., None], scheduler: Any, server_args: Any, *arguments: Any, **named: Any
) -> None:
    try:
        original(scheduler, server_args, *arguments, **named)
    except TieredError as error:
        # All ranks refuse a setting alike; a shard is refused by its own rank.
        rank, num_ranks = _place_among_ranks()
        if not isinstance(error, ConfigError) or rank == 0:
            of_rank = f"rank {rank}: " if num_ranks > 1 else ""
            print(f"sglang-tiered: {of_rank}{error}", file=sys.stderr, flush=True)
        if server_args.dp_size > 1:
            raise  # the controller of the replicas sees exceptions only
        # SGLang would print a traceback and kill the launcher, and the storage's threads and the
        # other ranks must not delay the exit.
        os._exit(REFUSED)


def _place_among_ranks() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _after_scheduler_died(result: Exception, _: int, process: Any) -> Exception:
    if process.exitcode != REFUSED:
        return result
    return SchedulerRefused("a scheduler refused its configuration, as it says on standard error")


def _after_init_info(result: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    from sglang_tiered.integration.observe.holdings import holdings

    cache = _cache_of(scheduler)
    if cache is not None:
        result[TIERS_INFO] = holdings(cache)
    return result


def _after_controller_info(result: dict[str, Any], controller: Any) -> dict[str, Any]:
    for info in controller._scheduler_init_infos[:1]:  # noqa: SLF001
        if TIERS_INFO in info:
            result[TIERS_INFO] = info[TIERS_INFO]
    return result


def _rest_on_idle(_: Any, scheduler: Any) -> None:
    from sglang_tiered.integration.observe.transfer_stats import manager_of

    handoff = manager_of(scheduler)
    if handoff is not None:
        handoff.rest()


def _before_generating(_: Any, obj: Any, request: Any = None) -> None:
    named_in_body.take_overrides(obj, request)
    named_in_body.carry(obj, request)


def _before_tokenizing(manager: Any, request: Any) -> None:
    refuse_placeholder_tokens(request, manager.model_config.vocab_size)
    drop_client_hashes(request)


class RepeatFilter(logging.Filter):
    """Passes a message with one of the prefixes once a minute, and every other message."""

    def __init__(
        self, prefixes: tuple[str, ...], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._prefixes = prefixes
        self._clock = clock
        self._next: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        for prefix in self._prefixes:
            if message.startswith(prefix):
                now = self._clock()
                if now < self._next.get(prefix, now):
                    return False
                self._next[prefix] = now + REPEAT_INTERVAL_S
        return True
