"""``Control``: the scheduler's side of ``service``, and purges. All of it runs on the scheduler
thread.

SGLang's control channel carries a method name and a JSON body to the schedulers of every rank;
SGLang's own debugger uses other names. A purge begins at once and in memory only. Whether it is
durable on every rank is asked afterwards, so the scheduler never waits for a disk.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_tiered.api import CallError
from sglang_tiered.integration.admin.calls import DETACHED, Calls, is_detached, outcome
from sglang_tiered.integration.admin.conversations import (
    Forgets,
    checkpoint,
    forget,
    pin,
    prefetch,
    residency,
    unpin,
)
from sglang_tiered.integration.admin.costs import CostBoard, CostPublisher
from sglang_tiered.integration.admin.listing import conversations, tenants
from sglang_tiered.integration.admin.prefixes import erasure_of, tenant_of_body
from sglang_tiered.integration.admin.service import CONTROL_PREFIX
from sglang_tiered.integration.cache.hints import EMPTIED, WEIGHTS
from sglang_tiered.integration.cache.quiescing import wait_for_loads
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.identity.tenants import key_of_request, short_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.integration.admin.calls import Steps
    from sglang_tiered.storage.base import Erasure


NO_TIERS = "this server has no tiers; start it with sglang_tiered.launch_server"

logger = logging.getLogger(__name__)


class Control:
    """Answers the tiers' control messages in one scheduler process and purges tenants."""

    def __init__(self) -> None:
        self.calls = Calls(
            {
                "purge": self._purge,
                "tenants": tenants,
                "conversations": conversations,
                "residency": residency,
                "checkpoint": checkpoint,
                "pin": pin,
                "unpin": unpin,
                "forget": partial(forget, Forgets()),
                "prefetch": prefetch,
            }
        )
        self._scheduler: Any = None  # of this process
        self._cache: TieredRadixCache | None = None  # of that scheduler
        self.costs: CostPublisher | None = None  # of that cache, where anybody is told

    def attach(self, scheduler: Any) -> None:
        """Apply the purges of other servers from now on, give requests keys that tell adapters
        from users, and tell routers the costs. The scheduler is complete."""
        cache = scheduler.tree_cache
        self._scheduler = scheduler
        self._cache = cache if isinstance(cache, TieredRadixCache) else None
        if self._cache is not None:
            self._cache.hide_heard = partial(self._hide_heard, cache)
            self.costs = _publish_costs(scheduler, self._cache)

    def reply(self, message: Any) -> None:
        """Answer a control message of the tiers."""
        from sglang.srt.managers.io_struct import DumperControlReqOutput

        try:
            answer = self._answer(message.method, message.body)
            reply = DumperControlReqOutput(success=True, response=[answer])
        except Exception as error:
            logger.exception(
                "internal error while answering %s; the caller gets its text", message.method
            )
            reply = DumperControlReqOutput(success=False, response=[], error=str(error))
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(reply, message)

    def rest(self) -> None:
        """Load nothing ahead: memory is to be emptied or the tiers to be detached, which SGLang
        does in an idle scheduler alone. Where nothing else is under way, wait until what was being
        loaded has ended, or SGLang would refuse at once."""
        cache, scheduler = self._cache, self._scheduler
        if cache is None or cache.tiering is None:
            return
        cache.tiering.hints.end_all(EMPTIED)
        paused = scheduler._engine_paused  # noqa: SLF001
        if paused:  # what waits in a buffer goes when its request is admitted
            cache.drop_loads(all_of_them=True)
        if scheduler.is_fully_idle(for_health_check=True, ignore_waiting=paused):
            wait_for_loads(cache)

    def memory_was_flushed(self) -> None:
        """Release purged tenants once SGLang has emptied device and host memory."""
        cache = self._cache
        if cache is not None and cache.hidden_tenants:
            cache.hidden_tenants.release_all()
            # A paused scheduler is flushed with requests waiting.
            _use_new_keys(self._scheduler, cache)

    def before_idle(self) -> None:
        """Tell routers that the scheduler has nothing to do: it rests within SGLang's method."""
        if self.costs is not None:
            self.costs.rests()

    def after_idle(self) -> None:
        """Reset a tree that holds purged nodes, once no request uses any. ``memory_was_flushed``
        releases the tenants: a flush may be refused, and then the nodes are still there."""
        cache, scheduler = self._cache, self._scheduler
        if cache is not None and cache.hidden_tenants and scheduler.is_fully_idle():
            # The pools stay: giving free memory back to a device stalls it, and frees no page.
            scheduler.flush_cache(empty_cache=False)

    def after_request(self, _: Any, request: Any, *__: Any, **___: Any) -> None:
        """Give a new request the key that it uses here."""
        if self._cache is not None:
            request.cache_salt = short_key(request.cache_salt)
            key = key_of_request(request.extra_key, request.lora_id)
            request.extra_key = self._cache.hidden_tenants.key_of(key, request.cache_salt)

    def _answer(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer one message. Every rank gets the same ones in the same order."""
        cache = self._cache
        if cache is None:
            return {"error": NO_TIERS, "status": 400}
        if "cache_salt" in body:
            body = {**body, "cache_salt": short_key(body["cache_salt"])}
        if cache.tiering is not None:  # an idle scheduler makes no step before it answers
            cache.tiering.hide_heard()
        name, number = method.removeprefix(CONTROL_PREFIX), str(body.get("id"))
        return self.calls.answer(cache, name, number, body)

    def _purge(self, cache: TieredRadixCache, number: str, body: dict[str, Any]) -> Steps:
        """Erase a tenant, or all, before the tree is reset: it would be asked to store it."""
        what = erasure_of(number, tenant=None if body.get("all") else tenant_of_body(cache, body))
        begun = cache.erase(what)
        _use_new_keys(self._scheduler, cache)
        _log_erased(what)
        self.after_idle()
        if is_detached(cache):
            raise CallError(DETACHED, 503)
        while True:
            done, durable = map(bool, (yield outcome(begun)))
            in_memory = "hidden" if cache.hidden_tenants else "gone"
            yield {"done": done, "durable": durable, "in_memory": in_memory}

    def _hide_heard(self, cache: TieredRadixCache, erasures: Sequence[Erasure]) -> None:
        """Put out of reach what other servers erased: their tiers and ours have done so."""
        for what in erasures:
            cache.hide(what)
            _log_erased(what)
        if any(what.keys is None for what in erasures):
            _use_new_keys(self._scheduler, cache)
        if cache.hidden_pages.are_too_many:  # to be looked up one by one, on every rank alike
            hide_memory(self._scheduler)
            cache.hidden_pages.clear()
            logger.info("device and host memory are hidden: too many pages in them were erased")


def _publish_costs(scheduler: Any, cache: TieredRadixCache) -> CostPublisher | None:
    """Publish the costs of the scheduler that receives the requests of its replica: the other ranks
    take part in the same batches."""
    from sglang.srt.runtime_context import get_parallel

    place = get_parallel()
    if cache.tiering is None or place.attn_tp_rank or place.attn_cp_rank:
        return None
    board = CostBoard.from_environment()
    if board is None:
        return None
    costs = CostPublisher(scheduler, cache, board, rank=place.dp_rank or 0)
    cache.tiering.publish_costs = costs.publish_if_due
    return costs


def _log_erased(what: Erasure) -> None:
    if what.keys is None:
        name = "everything" if what.tenant is None else f"tenant {what.tenant.hex()}"
        logger.info("purged %s%s", name, "" if what.spread else " (requested by another server)")


def hide_memory(scheduler: Any) -> None:
    """Hide what device and host memory hold, and store none of it any more; the tiers keep their
    pages and serve them. Every rank calls it in the same step."""
    cache = scheduler.tree_cache
    if cache.tiering is not None:
        cache.tiering.hints.end_all(WEIGHTS)
    cache.hidden_tenants.quarantine(None)
    if cache.storage is not None:
        cache.storage.refuse_queued_stores()
    _use_new_keys(scheduler, cache)


def _use_new_keys(scheduler: Any, cache: TieredRadixCache) -> None:
    """Have requests that wait match nothing from before, unless they hold some of it already."""
    if cache.tiering is not None:
        cache.tiering.memory_was_hidden()
    for request in _waiting(scheduler):
        if not _holds_kv(scheduler, cache, request):
            request.extra_key = cache.hidden_tenants.key_of(request.extra_key, request.cache_salt)


def _waiting(scheduler: Any) -> list[Any]:
    """Return the requests that will be matched, those that wait for the other side of a handoff
    included. Retracted ones keep what they have, on the host."""
    requests = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    if scheduler.disaggregation_mode.value == "prefill":
        requests += scheduler.disagg_prefill_bootstrap_queue.queue
    elif scheduler.disaggregation_mode.value == "decode":
        queue = scheduler.disagg_decode_prealloc_queue
        requests += (*(entry.req for entry in queue.queue), *queue.held_rebootstrap_reqs)
    return requests


def _holds_kv(scheduler: Any, cache: TieredRadixCache, request: Any) -> bool:
    """Whether a request that waits has KV of its own, which goes into the tree by its key. That KV
    is from before, and by a new key it would be stored and served. A session's record was only lent
    to one that waits, and the next match takes it back; decode has written into it already."""
    kv = request.kv
    if not (kv.holds_kv or kv.holds_mamba or kv.retraction_backup is not None):
        return False
    is_lent = cache.session.borrowed_slot(request) is not None
    return not is_lent or scheduler.disaggregation_mode.value == "decode"
