"""Hooks that bind a handoff to its model; ``hooks`` has the reason of each."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang_tiered.integration.disaggregation.request_rooms import (
    room_of_recompute,
    tokens_of,
)
from sglang_tiered.integration.names import TRANSFER_BACKEND
from sglang_tiered.integration.observe.transfer_stats import manager_of
from sglang_tiered.transfer.messages import Asked, is_other_model, is_other_prompt

__all__ = ["register"]

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ENDS_OF_HANDOFFS = (
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
)


def register() -> None:
    """Register them; SGLang applies them after all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.disaggregation.utils.prepare_abort", _before_abort, HookType.BEFORE
    )
    HookRegistry.register(f"{_SCHEDULER}.flush_cache", _after_flush, HookType.AFTER)
    for target in _ENDS_OF_HANDOFFS:
        HookRegistry.register(target, _before_handoff, HookType.BEFORE)
    for method in ("load_lora_adapter", "load_lora_adapter_from_tensors"):
        HookRegistry.register(f"{_SCHEDULER}.{method}", _after_adapter, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.unload_lora_adapter", _after_adapter_ended, HookType.AFTER)


def _before_abort(req: Any, error_message: str, status_code: Any = None) -> Any:
    """Answer 503 for a pair of unequal models, as another pair may serve the request, and 400 for
    unequal prompts."""
    if is_other_model(error_message):
        status_code = HTTPStatus.SERVICE_UNAVAILABLE
    elif is_other_prompt(error_message):
        status_code = HTTPStatus.BAD_REQUEST
    return (req, error_message, status_code), {}


def _before_handoff(queue: Any, req: Any, *_: Any, is_rebootstrap: bool = False, **__: Any) -> None:
    if queue.transfer_backend.value != TRANSFER_BACKEND:
        return
    manager = queue.kv_manager
    manager.arriving = Asked(manager.adapters.digest_of(req.lora_id), tokens_of(req))
    manager.recompute = {}
    if is_rebootstrap:
        name = manager.adapters.name_of(req.lora_id)
        manager.recompute = {"bootstrap_room": req.bootstrap_room, "lora_path": name}
        tokens = [*req.origin_input_ids, *req.output_ids]
        req.bootstrap_room = room_of_recompute(req.bootstrap_room, name, tokens)


def _after_adapter(result: Any, scheduler: Any, recv_req: Any) -> None:
    handoff = manager_of(scheduler)
    if handoff is not None and result.success:
        path = getattr(recv_req, "lora_path", None)
        handoff.adapters.note_loaded(recv_req.lora_id, path, recv_req.lora_name)


def _after_adapter_ended(result: Any, scheduler: Any, recv_req: Any) -> None:
    handoff = manager_of(scheduler)
    if handoff is not None and result.success:
        handoff.adapters.note_unloaded(recv_req.lora_id)


def _after_flush(flushed: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    handoff = manager_of(scheduler)
    if flushed and handoff is not None:
        handoff.handed.memory_was_flushed()
