"""Every hook into SGLang where it has no seam, each with its reason: one for a target, which calls
all that wants to hear of it, in order. For SGLang 0.5.23.

| target | kind | reason |
|---|---|---|
| Scheduler._record_scheduler_state_for_paused_engine | AFTER | while generation is paused, SGLang ignores stores that end, and would refuse a flush until it resumes |
| Scheduler.run_batch, Scheduler.process_batch_result | AROUND | the cost model learns from the duration of prefills, which SGLang does not report to the cache; and requests that generate give the tree what they have, which SGLang does at their end only (``publishing``) |
| Scheduler.is_fully_idle | AFTER | an abandoned load may still be reading while SGLang counts itself idle; ``/flush_cache`` then ends the scheduler, because its storage threads do not stop (``quiescing``) |
| Scheduler.__init__ | AROUND | the first call of ours in a scheduler's process reads the launcher's configuration, on which SGLang's sizing of memory waits; a configuration refused once pools are sized ends the process with one sentence and code 2, where SGLang prints a traceback; the cache does not know its scheduler, whose queue it must reach when another server purges a tenant; and messages to it pass ``SchedulerMessages``, which has a table of its own |
| entrypoints.engine._scheduler_died_error | AFTER | the launcher learns that the scheduler refused, and prints nothing more |
| Engine._launch_scheduler_processes, Engine._launch_detokenizer_subprocesses | AROUND, CPU only | SGLang spawns its processes, which import it again each; the launcher's are forks (``cpu.processes``) |
| Scheduler.get_init_info, DataParallelController.get_init_info | AFTER | the launcher's banner shows what the tiers hold, which only the scheduler knows |
| pool_host.base.ranks_per_host | AROUND | SGLang does not count the replicas of ``--dp-size`` among those that share the machine's memory |
| kv_cache_builder.auto_size_hicache | AROUND | SGLang raises, or makes a host tier of a few tokens, where hardly any memory is left |
| KVCacheConfigurator._profile_available_bytes | AROUND, CPU only | SGLang gives the device pool most of the machine's memory, which the host tier needs too (``cpu.memory``) |
| configs.model_config._get_and_verify_dtype | AROUND, CPU only | SGLang makes float16 of a float32 checkpoint, which a CPU computes slowest of all formats (``cpu.platform``) |
| Scheduler.flush_cache | AFTER | a flush releases purged tenants, and prefill hands KV over again that may have been of weights before |
| Scheduler.on_idle | AROUND | the last record of ``/tier/costs`` must not show work while the scheduler rests; nodes that a purge left in the tree are removed when no request uses them, as SGLang's tree cannot remove one tenant; on a CPU, a scheduler that waits for a handoff polls without a pause, on the cores that the other instance computes on |
| mem_cache.utils.storage_namespace_seed | AROUND | the other key of a purged tenant's requests separates nodes in the tree only; every tier knows a page by one hash |
| Req.__init__ | AFTER | requests of a purged tenant must not match nodes still in the tree; SGLang appends the id of a LoRA adapter to ``extra_key``, so a user's key could name an adapter's pages |
| utils.auth.decide_request_auth | AROUND | ``GET /tier/costs`` and ``POST /pd_role_switch`` take keys that open nothing else, of the latter one order alone, so that whoever a router takes for a server learns none that does |
| TokenizerManager.generate_request | BEFORE | endpoints of Anthropic's and Ollama's API drop ``cache_salt``, ``session_id`` and ids; those that cannot take a salt ignore it; and ``/v1/completions`` and others ignore what a gateway says in headers (``request_names``) |
| TokenizerManager._tokenize_one_request | BEFORE | a client may send hashes of its images, and so store one image's pages under another's key (``media_hashes``) |
| TokenizerManager._create_tokenized_object | AFTER | SGLang does not hand a request's ``conversation_id`` to the schedulers, which pin, list and forget by it (``request_names``); and of what a request asks for its room is made |
| GenerateReqInput.normalize_batch_and_arguments | AFTER | SGLang ends both schedulers where a client gives a list for the room of one prompt, and answers 500 where the list is too short (``request_rooms``) |
| TokenizerManager._dispatch_to_scheduler | BEFORE | SGLang gives every sample of ``n`` the same room, and takes a number that two clients draw for one request's (``request_rooms``) |
| SchedulerWeightUpdaterManager.flush_cache_after_weight_update | AFTER | a refused flush fails the update's answer, which then does not tell whether all weights are there |
| TokenizerManager.pd_role_switch | AROUND | SGLang refuses to switch the role of a server that has requests, and routers go on sending them (``admin.role_switch``) |
| disaggregation.utils.get_kv_class | AROUND | SGLang's table of transfer backends is closed; ``zmq`` is answered here, all others are passed on |
| PrefillBootstrapQueue.create_sender, DecodePreallocQueue._create_receiver_and_enqueue | BEFORE | SGLang does not tell the ends of a handoff which adapter and tokens its request has |
| disaggregation.utils.prepare_abort | BEFORE | a handoff between servers of unequal models is answered with 503, not 500: another pair may serve the request |
| disaggregation.utils.TransferBackend | member | the enum of their names is closed too |
| DecodePreallocQueue.__init__ | AFTER | it looks for a prefill server once a second, on the scheduler's thread; for ``zmq`` a thread looks. The same holds for the replica of ``--dp-size`` that has a request (``CommonKVReceiver.query_prefill_dp_ranks``, which has no access to the manager that knows). And the manager learns the stream of forwards, which may still write what a room is given |
| DecodePreallocQueue.{_update_handshake_waiters, _start_hicache_prefetch, pop_preallocated}, DecodeTransferQueue.pop_transferred | AFTER | SGLang promises prefill the pages that storage holds before they are loaded, and fails the request when fewer arrive; ``decode_loads`` loads first |
| Scheduler._prefetch_kvcache | AROUND | what is noted of a request begins here (``observe.stories``); with priorities, requests and their loads go first that have a higher one, of which SGLang tells the cache nothing; which requests may be computed in chunks of ours, of which the cache hears nothing; and for one with embedding overrides SGLang would load a prefix that it never matches |
| PrefillAdder.{_select_prefill_admission, add_chunked_req} | AROUND | a chunk of a front ends where it is expected to meet its back, which SGLang knows no reason for; and then nobody else may be chunked in the same batch (``cache.returns``) |
| PrefillAdder._commit_prefill_admission, Scheduler.stash_chunked_request | AFTER | a request whose back has arrived gives its row back at a chunk boundary: SGLang matches a chunked request against the tree no more |
| hybrid_pool_assembler.HybridCacheController | another class, while a cache is built | SGLang makes its controller by this name alone, and its threads store one node and load one prefix at a time, 128 pages a call (``storage.controller``) |
"""  # noqa: E501

from __future__ import annotations

import logging
import os
import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sglang_tiered.config import TRANSFER_BACKEND, TieredConfig
from sglang_tiered.errors import ConfigError, SchedulerRefused, TieredError
from sglang_tiered.integration.cache import factory, host_size
from sglang_tiered.integration.cache.prefill_times import PrefillClock
from sglang_tiered.integration.cache.publishing import checkpoint_answers
from sglang_tiered.integration.identity import request_names, tenants
from sglang_tiered.integration.identity.media_hashes import (
    drop_client_hashes,
    refuse_placeholder_tokens,
)
from sglang_tiered.integration.platforms import memory, processes
from sglang_tiered.integration.platforms.cpu import around_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang.srt.plugins.hook_registry import HookType

    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.disaggregation.handoffs import Handoffs
    from sglang_tiered.integration.scheduler_messages import SchedulerMessages


_DISAGGREGATION = "sglang.srt.disaggregation"
_PREALLOCATION = f"{_DISAGGREGATION}.decode.DecodePreallocQueue"
_ENGINE = "sglang.srt.entrypoints.engine"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_REQUEST = "sglang.srt.managers.io_struct.GenerateReqInput"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_REPLICAS = "sglang.srt.managers.data_parallel_controller.DataParallelController"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_CACHE = "sglang.srt.mem_cache"

REFUSED = 2
"""Exit code of a scheduler that has printed why it refuses to start."""
TIERS_INFO = "sglang_tiered_tiers"
"""Key of what the tiers hold in a scheduler's start message."""

logger = logging.getLogger(__name__)


def register() -> Hooks:
    """Register the hooks; SGLang applies them after all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_tiered.integration.cache.returns import drop_segment_lines

    _add_transfer_backend()
    hooks = Hooks(on_cpu=not torch.accelerator.is_available())
    for target, hook, kind in hooks.table():
        HookRegistry.register(target, hook, kind)
    logging.getLogger(f"{_CACHE}.unified_radix_cache").addFilter(drop_segment_lines)
    return hooks


def _add_transfer_backend() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.disaggregation import utils

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


class Hooks:
    """The hooks of one process. ``config`` is what our launcher decided: None in a process without
    a scheduler, and where another started it."""

    def __init__(self, *, on_cpu: bool) -> None:
        from sglang_tiered.integration.admin.control import Control

        self.config: TieredConfig | None = None
        self._on_cpu = on_cpu
        self._clock = PrefillClock()
        self._control = Control()
        self._messages: SchedulerMessages | None = None  # once there is a scheduler
        self._handoffs: Handoffs | None = None  # once it has a KV manager of ours

    def table(self) -> Iterator[tuple[str, Callable[..., Any], HookType]]:
        """Yield every hook with its target and kind."""
        from sglang.srt.plugins.hook_registry import HookType

        from sglang_tiered.integration.admin.role_switch import around_auth, around_switch
        from sglang_tiered.integration.cache import returns
        from sglang_tiered.integration.disaggregation import decode_loads, request_rooms

        around: dict[str, Callable[..., Any]] = {
            f"{_SCHEDULER}.__init__": self.around_scheduler,
            f"{_SCHEDULER}.run_batch": self._clock.around_run,
            f"{_SCHEDULER}.process_batch_result": self.around_result,
            f"{_SCHEDULER}.on_idle": self.around_idle,
            f"{_SCHEDULER}._prefetch_kvcache": self.around_prefetch,
            f"{_ADDER}._select_prefill_admission": returns.around_select,
            f"{_ADDER}.add_chunked_req": returns.around_add_chunked,
            f"{_CACHE}.pool_host.base.ranks_per_host": self.around_ranks_per_host,
            f"{_CACHE}.kv_cache_builder.auto_size_hicache": host_size.around_auto_size,
            f"{_CACHE}.utils.storage_namespace_seed": tenants.around_seed,
            "sglang.srt.utils.auth.decide_request_auth": around_auth,
            f"{_TOKENIZER}.pd_role_switch": around_switch,
            f"{_DISAGGREGATION}.utils.get_kv_class": self.around_get_kv_class,
        }
        before: dict[str, Callable[..., Any]] = {
            f"{_TOKENIZER}.generate_request": _before_generating,
            f"{_TOKENIZER}._tokenize_one_request": _before_tokenizing,
            f"{_TOKENIZER}._dispatch_to_scheduler": request_rooms.before_dispatch,
            f"{_DISAGGREGATION}.utils.prepare_abort": request_rooms.before_abort,
            f"{_DISAGGREGATION}.prefill.PrefillBootstrapQueue.create_sender": (
                request_rooms.before_handoff
            ),
            f"{_PREALLOCATION}._create_receiver_and_enqueue": request_rooms.before_handoff,
        }
        after: dict[str, Callable[..., Any]] = {
            f"{_UPDATER}.flush_cache_after_weight_update": self.after_flush_of_update,
            f"{_SCHEDULER}._record_scheduler_state_for_paused_engine": _after_pause,
            f"{_SCHEDULER}.is_fully_idle": _after_is_fully_idle,
            f"{_SCHEDULER}.flush_cache": self.after_flush,
            f"{_SCHEDULER}.stash_chunked_request": returns.after_stash,
            f"{_SCHEDULER}.get_init_info": _after_init_info,
            f"{_REPLICAS}.get_init_info": _after_controller_info,
            f"{_ADDER}._commit_prefill_admission": returns.after_commit,
            f"{_ENGINE}._scheduler_died_error": _after_scheduler_died,
            f"{_TOKENIZER}._create_tokenized_object": _after_tokenizing,
            f"{_REQUEST}.normalize_batch_and_arguments": request_rooms.check_rooms,
            "sglang.srt.managers.schedule_batch.Req.__init__": self._control.after_request,
            f"{_PREALLOCATION}.__init__": _after_decode_queue,
            f"{_PREALLOCATION}._update_handshake_waiters": decode_loads.after_handshakes,
            f"{_PREALLOCATION}._start_hicache_prefetch": decode_loads.after_match,
            f"{_PREALLOCATION}.pop_preallocated": decode_loads.after_preallocation,
            f"{_DISAGGREGATION}.decode.DecodeTransferQueue.pop_transferred": (
                decode_loads.after_transfers
            ),
        }
        if self._on_cpu:
            configurator = f"{_CACHE}.kv_cache_configurator.KVCacheConfigurator"
            around[f"{configurator}._profile_available_bytes"] = self.around_profile
            dtype = "sglang.srt.configs.model_config._get_and_verify_dtype"
            around[dtype] = around_dtype
            for starts in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"):
                around[f"{_ENGINE}.Engine.{starts}"] = processes.around_start
        for kind, hooks in (
            (HookType.AROUND, around),
            (HookType.BEFORE, before),
            (HookType.AFTER, after),
        ):
            for target, hook in hooks.items():
                yield target, hook, kind

    # ---- What the configuration decides ----

    def around_scheduler(
        self, original: Callable[..., None], scheduler: Any, server_args: Any, *more: Any, **by: Any
    ) -> None:
        try:
            self.config = TieredConfig.from_environment()
            if self.config is not None:
                host_size.reserve_for_tier(self.config)
            original(scheduler, server_args, *more, **by)
            from sglang_tiered.integration.scheduler_messages import SchedulerMessages

            self._control.attach(scheduler)
            self._messages = SchedulerMessages(scheduler, self._control)
            scheduler._request_dispatcher = self._messages  # noqa: SLF001
        except TieredError as error:
            from sglang.srt.runtime_context import get_parallel

            # All ranks refuse a setting alike; a shard is refused by its own rank.
            rank, num_ranks = _place_among_ranks()
            if not isinstance(error, ConfigError) or rank == 0:
                of_rank = f"rank {rank}: " if num_ranks > 1 else ""
                print(f"sglang-tiered: {of_rank}{error}", file=sys.stderr, flush=True)
            if get_parallel().num_dp_ranks > 1:
                raise  # the controller of the replicas sees exceptions only
            # SGLang would print a traceback and kill the launcher, and the storage's threads and
            # the other ranks must not delay the exit.
            os._exit(REFUSED)

    def build_cache(self, ctx: Any) -> Any:
        """Build the cache of the scheduler that is being made."""
        return factory.build(ctx, self.config)

    def around_ranks_per_host(self, original: Callable[[], int]) -> int:
        """Count the replicas of ``--dp-size`` too: each would size its host tier by the whole
        machine's memory."""
        return original() if self.config is None else self.config.num_ranks

    def around_profile(self, original: Callable[..., int], configurator: Any, _: float) -> int:
        return memory.around_profile(original, configurator, self.config)

    def around_get_kv_class(
        self, original: Callable[..., Any], backend: Any, class_type: Any
    ) -> Any:
        if backend.value != TRANSFER_BACKEND or class_type.value == "kvargs":
            return original(backend, class_type)
        from sglang_tiered.integration.disaggregation import manager as kv_transfer

        if class_type.value == "manager":
            from sglang_tiered.integration.disaggregation.handoffs import Handoffs

            self._handoffs = self._handoffs or Handoffs(self.config)
            return partial(kv_transfer.make_manager, self._handoffs)
        return kv_transfer.CLASSES[class_type.value]

    # ---- Of a scheduler ----

    def around_prefetch(
        self, original: Callable[..., Any], scheduler: Any, req: Any, *rest: Any, **named: Any
    ) -> Any:
        from sglang.srt.runtime_context import get_memory

        cache = _cache_of(scheduler)
        tiering = None if cache is None else cache.tiering
        if tiering is not None:
            tiering.notes.arrives(scheduler, req)
        if cache is not None and req.positional_embed_overrides is not None:
            return None
        if tiering is not None:
            has_rank = scheduler.enable_priority_scheduling
            tiering.loads.comes(
                req,
                get_memory().hicache_storage_prefetch_retry_max_attempts,
                scheduler.policy.priority_sign * (req.priority or 0) if has_rank else 0,
            )
            tiering.returns.comes(scheduler, req)
        return original(scheduler, req, *rest, **named)

    def around_result(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any
    ) -> Any:
        returned = self._clock.around_result(original, scheduler, batch, result)
        nvme = None if self.config is None else self.config.nvme
        if nvme is not None and nvme.checkpoint_tokens is not None:
            cache = _cache_of(scheduler)
            if cache is not None and cache.tiering is not None:
                may_free = scheduler.disaggregation_mode.value != "decode"
                checkpoint_answers(cache, batch, nvme.checkpoint_tokens, may_free=may_free)
        return returned

    def after_flush_of_update(
        self, _: Any, updater: Any, recv_req: Any, success: bool, *__: Any
    ) -> None:
        if self._messages is not None:
            self._messages.note_loaded(recv_req, is_loaded=success)

    def after_flush(self, flushed: bool, *_: Any, **__: Any) -> None:
        if flushed and self._messages is not None:
            self._messages.memory_was_flushed()

    def around_idle(self, original: Callable[[Any], None], scheduler: Any) -> None:
        from sglang_tiered.integration.observe.stats import manager_of

        self._control.before_idle()
        original(scheduler)
        handoff = manager_of(scheduler) if self._on_cpu else None
        if handoff is not None:
            handoff.rest()
        self._control.after_idle()


def _after_decode_queue(_: Any, queue: Any, *__: Any, **___: Any) -> None:
    if queue.transfer_backend.value == TRANSFER_BACKEND:
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        # SGLang's class must not keep a manager alive whose role was switched, and is looked at
        # again when the next is made.
        client = weakref.proxy(queue.kv_manager.bootstrap_client)
        queue.kv_manager.forward_stream = queue.scheduler.forward_stream

        def ask(bootstrap_addr: str, bootstrap_rooms: list[int]) -> Any:
            return client.replicas_of(bootstrap_addr, bootstrap_rooms)

        CommonKVReceiver.query_prefill_dp_ranks = staticmethod(ask)
        queue._ensure_prefill_info = queue.kv_manager.bootstrap_client.sort_waiting  # noqa: SLF001


def _cache_of(scheduler: Any) -> TieredRadixCache | None:
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache

    cache = getattr(scheduler, "tree_cache", None)
    return cache if isinstance(cache, TieredRadixCache) else None


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


def _place_among_ranks() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _after_scheduler_died(result: Exception, _: int, process: Any) -> Exception:
    if process.exitcode != REFUSED:
        return result
    return SchedulerRefused("a scheduler refused its configuration, as it says on standard error")


def _after_init_info(result: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    from sglang_tiered.integration.observe.stats import holdings

    cache = _cache_of(scheduler)
    if cache is not None:
        result[TIERS_INFO] = holdings(cache)
    return result


def _after_controller_info(result: dict[str, Any], controller: Any) -> dict[str, Any]:
    for info in controller._scheduler_init_infos[:1]:  # noqa: SLF001
        if TIERS_INFO in info:
            result[TIERS_INFO] = info[TIERS_INFO]
    return result


def _before_generating(manager: Any, obj: Any, request: Any = None) -> None:
    request_names.take_overrides(obj, request)
    request_names.carry(obj, request)


def _before_tokenizing(manager: Any, request: Any) -> None:
    refuse_placeholder_tokens(request, manager.model_config.vocab_size)
    drop_client_hashes(request)


def _after_tokenizing(tokenized: Any, manager: Any, request: Any, *_: Any, **__: Any) -> None:
    from sglang_tiered.integration.disaggregation import request_rooms

    request_names.after_tokenizing(tokenized, request)
    request_rooms.after_tokenizing(tokenized, request)
