"""``SchedulerMessages``: what the tiers do about a message to a scheduler, beside what SGLang does.

SGLang's scheduler hands each message by its type to a method. This stands before that table, in the
place of a hook on each of those methods. Scheduler thread; every rank gets the same messages in the
same order.

| message | reason |
|---|---|
| update of weights, and the two ends of a session of updates | weights replaced in a running server make every stored page stale; SGLang flushes the tree (if asked) but never the storage (sglang issues 24758, 26792); what is handed over is named anew. With stores under way SGLang refuses the flush, and old KV stays in memory under new weights |
| release of memory | SGLang ends the scheduler while stores are under way; and released weights come back as garbage, whose KV must not be stored under their namespace |
| its resumption | SGLang ends the scheduler when asked to resume what was not released, as after a disk that hung |
| flush, detachment of the storage | both need an idle scheduler; hints that load for no request would keep it busy |
| ``POST /hicache/storage-backend/clear`` | it must empty memory only; ``/tier/purge`` alone removes what NVMe, the bucket and other servers hold |
| switch of role | it needs an idle scheduler too, and drops what waits to be stored; what a flush ends ends with it; routers must hear of the new role before the next request |
| of SGLang's debugger | a control message with free content, which reaches every rank; those of the tiers are answered, all others are passed on |
| internal state | ``/server_info`` shows the tiers without ``--enable-metrics``, and the counters of the ``pod`` attention backend |
| a LoRA adapter comes or goes | an adapter that was loaded while the server runs is part of what KV means, and has another id on every server |
"""  # noqa: E501

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ClearHiCacheReqInput,
    ClearHiCacheReqOutput,
    DetachHiCacheStorageReqInput,
    DumperControlReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    GetInternalStateReq,
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
    PdRoleSwitchReqInput,
    PdRoleSwitchReqOutput,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    UnloadLoRAAdapterReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.runtime_context import get_exec

from sglang_tiered.integration.admin.control import hide_memory
from sglang_tiered.integration.admin.service import CONTROL_PREFIX
from sglang_tiered.integration.attention.pod import PodAttention
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.disaggregation.handoffs import WeightUpdate
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.observe.stats import (
    health_reasons,
    holdings,
    manager_of,
    state_of,
    transfer_stats,
)
from sglang_tiered.integration.ranks import least_on_every_rank
from sglang_tiered.metrics import METRICS, TRANSFER_METRICS
from sglang_tiered.policy.server_costs import NOT_IDLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.integration.admin.control import Control


_ALONE = UpdateWeightFromDiskReqInput, UpdateWeightsFromIPCReqInput
_IN_SESSION = (
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    EndWeightUpdateReqInput,
)
"""Updates of weights, of which the last ends their session."""

_CAN, _CAN_SOON = 2, 1
"""Of a rank that is to switch its role: at once, or once it is idle. 0: never."""

logger = logging.getLogger(__name__)


class SchedulerMessages:
    """Of one scheduler, whose own table it calls; see the module docstring."""

    def __init__(self, scheduler: Any, control: Control) -> None:
        self._scheduler = scheduler
        self._control = control
        self._dispatch: Callable[[Any], Any] = scheduler._request_dispatcher  # noqa: SLF001
        self._session_flushes = False  # whether a call of this session of updates wanted a flush
        self._loaded: tuple[Any, bool] = None, False  # an update, and whether all weights are there
        self._handlers: dict[type, Callable[[Any], Any]] = {
            **dict.fromkeys(_ALONE, self._update_weights),
            BeginWeightUpdateReqInput: self._begin_session,
            **dict.fromkeys(_IN_SESSION, self._update_weights),
            ReleaseMemoryOccupationReqInput: self._release,
            ResumeMemoryOccupationReqInput: self._resume,
            FlushCacheReqInput: self._rest,
            DetachHiCacheStorageReqInput: self._rest,
            ClearHiCacheReqInput: self._clear,
            PdRoleSwitchReqInput: self._switch_role,
            DumperControlReqInput: self._answer,
            GetInternalStateReq: self._tell_state,
            LoadLoRAAdapterReqInput: self._change_adapters,
            LoadLoRAAdapterFromTensorsReqInput: self._change_adapters,
            UnloadLoRAAdapterReqInput: self._change_adapters,
        }

    def __call__(self, message: Any) -> Any:
        return self._handlers.get(type(message), self._dispatch)(message)

    @property
    def _cache(self) -> TieredRadixCache | None:
        cache = self._scheduler.tree_cache
        return cache if isinstance(cache, TieredRadixCache) else None

    @property
    def _is_idle(self) -> bool:
        scheduler = self._scheduler
        return bool(scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused))  # noqa: SLF001

    # ---- Weights ----

    def note_loaded(self, message: Any, *, is_loaded: bool) -> None:
        """Note within an update whether all its weights are there. SGLang fails the call all the
        same if the flush behind them is refused."""
        self._loaded = message, is_loaded

    def _update_weights(self, message: Any) -> Any:
        """Treat a failed update as an update too: it may have replaced some weights. One of a
        session that is refused has none. The call that ends a session has no field that asks for a
        flush: it goes by the others of the session."""
        cache, wants_flush = self._cache, getattr(message, "flush_cache", None)
        if cache is not None and wants_flush:
            cache.quiesce()
        result = self._dispatch(message)
        if isinstance(message, _IN_SESSION):
            if not (result.success or self._is_in_session):
                return result
            self._session_flushes |= bool(wants_flush)
            wants_flush = self._session_flushes if wants_flush is None else wants_flush
        loaded, was_loaded = self._loaded
        is_loaded = result.success or (loaded is message and was_loaded)
        update = WeightUpdate(
            getattr(message, "model_path", None),
            getattr(message, "load_format", None),
            is_complete=is_loaded and not self._is_in_session,
        )
        self._weights_changed(update, wants_flush=bool(wants_flush))
        return result

    @property
    def _is_in_session(self) -> bool:
        return self._scheduler.weight_updater._session is not None  # noqa: SLF001

    def _begin_session(self, message: Any) -> Any:
        """Expect weights to change without a call from now on, for example by RDMA."""
        result = self._dispatch(message)
        if result.success:
            self._session_flushes = False
            self._weights_changed(WeightUpdate(), are_final=False)
        return result

    def _weights_changed(
        self, update: WeightUpdate, *, wants_flush: bool = False, are_final: bool = True
    ) -> None:
        scheduler, cache = self._scheduler, self._cache
        handoff = manager_of(scheduler)
        # What is left in memory counts, not what the call asked for: the last call of a session
        # flushes nothing, and a flush may have been refused, by a single rank whose load failed.
        is_idle = self._is_idle
        if cache is None:
            if handoff is not None:
                namespace.drop_digests()
                is_clean = are_final and is_idle and not _holds_kv(scheduler.tree_cache)
                handoff.weights_changed(update, memory_is_clean=is_clean)
            return
        (is_empty,) = least_on_every_rank(cache, [int(is_idle and cache.is_empty)])
        hides = wants_flush and not is_empty
        if hides:
            logger.warning(
                "memory was not flushed after the change of weights (requests run or a disk "
                "hangs); no request that comes now matches the old pages, and no tier takes them"
            )
            hide_memory(scheduler)
        is_clean = are_final and bool(is_empty or hides)
        cache.change_weights(tree_is_empty=is_clean)
        if handoff is not None:
            handoff.weights_changed(update, memory_is_clean=is_clean)

    # ---- Memory ----

    def _release(self, message: Any) -> Any:
        cache = self._cache
        # Stages of a pipeline do not wait, and SGLang ends a scheduler that is not idle. They have
        # equal trees and hear of each end in the same step, so they decide alike.
        if cache is not None and not (cache.quiesce() and (cache.pp_size == 1 or self._is_idle)):
            logger.error(
                "no memory was released (the disk of the NVMe tier hangs and may still write to "
                "host memory, or stages of a pipeline still compute or store); release it again "
                "once the disk answers"
            )
            return ReleaseMemoryOccupationReqOutput()
        result = self._dispatch(message)
        of_weights = not message.tags or GPU_MEMORY_TYPE_WEIGHTS in message.tags
        are_kept = get_exec().features.enable_weights_cpu_backup
        saver = self._scheduler.weight_updater.memory_saver_adapter
        if of_weights and saver.enabled and not are_kept:
            self._weights_changed(WeightUpdate(), are_final=False)
        return result

    def _resume(self, message: Any) -> Any:
        if self._cache is not None:
            asked = message.tags or GPU_MEMORY_ALL_TYPES
            released = self._scheduler.weight_updater.offload_tags
            message.tags = [tag for tag in asked if tag in released]
            if not message.tags:
                return ResumeMemoryOccupationReqOutput()
        return self._dispatch(message)

    def _rest(self, message: Any) -> Any:
        self._control.rest()
        return self._dispatch(message)

    def memory_was_flushed(self) -> None:
        """Note that SGLang has emptied device and host memory."""
        self._control.memory_was_flushed()
        handoff = manager_of(self._scheduler)
        if handoff is not None:
            handoff.handed.memory_was_flushed()

    def _switch_role(self, message: Any) -> Any:
        """Switch once what waits for NVMe is stored, and every rank can. The ranks answer when all
        have switched, or one would take requests that another cannot hand over yet."""
        self._control.rest()
        cache = self._cache
        if cache is not None and cache.tiering is not None and cache.tiering.awaits_stores:
            return PdRoleSwitchReqOutput(
                message=f"{NOT_IDLE}; pages wait to be stored on NVMe, ask again",
                old_role=self._scheduler.disaggregation_mode.value,
                new_role=message.new_role,
                safe_to_restore=True,
            )
        result = self._dispatch(msgspec.structs.replace(message, prepare_only=True))
        if cache is not None:
            can_switch = _CAN if result.success else int(NOT_IDLE in result.message)
            (least,) = least_on_every_rank(cache, [can_switch])
            if least < can_switch:
                result.success = False
                problem = "cannot switch" if least < _CAN_SOON else NOT_IDLE
                result.message = f"{problem}: another rank's log says why"
        if message.prepare_only or not result.success or result.old_role == result.new_role:
            return result
        result = self._dispatch(message)
        if cache is not None:
            (has_switched,) = least_on_every_rank(cache, [int(result.success)])
            result.success = bool(has_switched)
        if result.success:
            self.memory_was_flushed()
            if self._control.costs is not None:
                self._control.costs.publish_if_due(math.inf)
        return result

    def _clear(self, message: Any) -> Any:
        cache = self._cache
        if cache is None or cache.storage is None:  # the storage is another's
            return self._dispatch(message)
        self._control.rest()
        return ClearHiCacheReqOutput(success=bool(self._scheduler.flush_cache()))

    # ---- Others ----

    def _answer(self, message: Any) -> Any:
        is_ours = message.method.startswith(CONTROL_PREFIX)
        return self._control.reply(message) if is_ours else self._dispatch(message)

    def _tell_state(self, message: Any) -> Any:
        result, scheduler, cache = self._dispatch(message), self._scheduler, self._cache
        told: dict[str, Any] = result.internal_state
        if (handoff := manager_of(scheduler)) is not None:
            stats = transfer_stats(handoff.endpoint)
            told["sglang_tiered_transfer"] = state_of(TRANSFER_METRICS, stats)
        if PodAttention.statistics.serving:
            told["sglang_tiered_pod"] = PodAttention.statistics.state()
        if cache is not None:
            told["sglang_tiered"] = _state_of(cache)
            if self._control.costs is not None:
                told["sglang_tiered"]["costs"] = msgspec.to_builtins(self._control.costs.take())
        return result

    def _change_adapters(self, message: Any) -> Any:
        result, handoff = self._dispatch(message), manager_of(self._scheduler)
        if handoff is None or not result.success:
            return result
        if isinstance(message, UnloadLoRAAdapterReqInput):
            handoff.adapters.note_unloaded(message.lora_id)
        else:
            path = getattr(message, "lora_path", None)
            handoff.adapters.note_loaded(message.lora_id, path, message.lora_name)
        return result


def _holds_kv(tree: Any) -> bool:
    """Whether a tree of SGLang's own holds any KV."""
    try:
        held = tree.total_size()
    except NotImplementedError:  # without a prefix cache
        return False
    return any(held if isinstance(held, tuple) else (held,))


def _state_of(cache: TieredRadixCache) -> dict[str, Any]:
    """Return what ``/server_info`` shows of the tiers."""
    state: dict[str, Any] = {"tiers": holdings(cache)}
    stats = cache.process_stats()
    state |= state_of(METRICS, stats)
    for name, reason in health_reasons(stats).items():
        state[f"tier_unhealthy_because:{name}"] = reason
    return state
