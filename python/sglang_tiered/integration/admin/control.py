"""Purges in a scheduler process, and the desk for all that ``http_api`` asks for, on the
scheduler thread.

SGLang's control channel carries a method name and a JSON body to the schedulers of every rank; it
serves its own debugger under other names. A purge begins at once and in memory only. Whether it is
durable on every rank is asked for afterwards, so the scheduler never waits for a disk.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_tiered.config import TieredConfig
from sglang_tiered.integration.admin.conversations import checkpoint, residency
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.cache.rank_consensus import least_on_every_rank
from sglang_tiered.integration.identity.tenants import key_of_request, tenant_digest
from sglang_tiered.integration.storage.remote_purges import with_unknown

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "PREFIX",
    "after_flush",
    "attach",
    "empty_memory",
    "handle",
    "hide_memory",
    "key_of_new_request",
    "on_idle",
]

PREFIX = "sglang_tiered."
DETACHED = (
    "the NVMe tier is detached: what it holds was not purged, only memory was; attach it and purge "
    "again"
)
_MAX_ANSWERS = 256

logger = logging.getLogger(__name__)


class _Desk:
    """What was begun in this process, by the id its asker gave."""

    def __init__(self) -> None:
        self.purges: OrderedDict[str, list[Future[bool]]] = OrderedDict()
        self.reports: OrderedDict[str, Future[list[dict[str, Any]]]] = OrderedDict()
        self.has_tiers = False  # of the scheduler of this process
        self.resetting = False  # the flush that comes is ours; nobody asked for it
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], list[dict[str, Any]]]) -> Future[list[dict[str, Any]]]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="tier-report")
        return self._pool.submit(work)


_desk = _Desk()


def handle(scheduler: Any, method: str, body: dict[str, Any]) -> dict[str, Any]:
    """Answer one message. Every rank gets the same ones in the same order."""
    cache = scheduler.tree_cache
    if not isinstance(cache, TieredRadixCache):
        return {"error": "this server has no tiers; start it with sglang_tiered.launch_server"}
    number = str(body.get("id"))
    if method == PREFIX + "residency":
        return residency(cache, body)
    if method == PREFIX + "checkpoint":
        return checkpoint(cache, number, body)
    if method == PREFIX + "tenants":
        return _report(cache, number, int(body["limit"]))
    if number not in _desk.purges:
        tenant = None
        if not body.get("all"):
            tenant = tenant_digest(body.get("extra_key"), body.get("cache_salt"))
        _remember(_desk.purges, number, begin(scheduler, cache, tenant))
        on_idle(scheduler)
    purges = _desk.purges[number]
    done = all(purge.done() for purge in purges)
    durable = done and all(purge.result() for purge in purges)
    done, durable = map(bool, least_on_every_rank(cache, [int(done), int(durable)]))
    config = TieredConfig.from_environment()
    if cache.storage is None and config is not None and config.nvme is not None:
        del _desk.purges[number]  # whoever asks again begins anew
        return {"error": DETACHED}
    return {"done": done, "durable": durable, "in_memory": "hidden" if cache.fence else "gone"}


def begin(
    scheduler: Any, cache: TieredRadixCache, tenant: bytes | None, *, was_told: bool = False
) -> list[Future[bool]]:
    """Put the pages of a tenant, or all, out of reach in every tier; and tell other servers to do
    the same, unless one of them told us."""
    # Before the tree is reset, or it would be asked to store what is purged.
    cache.fence.raise_against(tenant)
    warm_list = cache.purge_warm_list(tenant)
    purges = [] if warm_list is None else [warm_list]
    if cache.storage is not None:
        purges += [
            # Who is told of the one thinks of the other too.
            cache.storage.begin_purge(each, was_told=was_told, tells_peers=each == tenant)
            for each in with_unknown(tenant)
        ]
    _use_new_keys(scheduler, cache)
    what = "everything" if tenant is None else f"tenant {tenant.hex()}"
    logger.info("purged %s%s", what, ", as another server did" if was_told else "")
    return purges


def hide_memory(scheduler: Any) -> None:
    """Put what device and host memory hold out of reach until they are emptied, in the next idle
    moment; the tiers stay as they are. Every rank calls it in the same step."""
    cache = scheduler.tree_cache
    cache.fence.raise_against(None)
    _use_new_keys(scheduler, cache)


def _use_new_keys(scheduler: Any, cache: TieredRadixCache) -> None:
    for request in (*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue):
        request.extra_key = cache.fence.key_of(request.extra_key, request.cache_salt)


def attach(scheduler: Any) -> None:
    """From now on, what other servers purge is put out of reach here too, and requests go by keys
    that tell adapters from users."""
    cache = scheduler.tree_cache
    _desk.has_tiers = isinstance(cache, TieredRadixCache)
    if isinstance(cache, TieredRadixCache):
        cache.purge_as_told = partial(begin, scheduler, cache, was_told=True)


def on_idle(scheduler: Any) -> None:
    """Reset a tree that holds purged nodes, once no request uses any. ``after_flush`` lifts the
    fence: a flush may be refused, and then the nodes are still there."""
    cache = scheduler.tree_cache
    if isinstance(cache, TieredRadixCache) and cache.fence and scheduler.is_fully_idle():
        empty_memory(scheduler)


def empty_memory(scheduler: Any) -> bool:
    """Empty device and host memory and leave the tiers as they are, whatever ``--tier-flush``
    says. Whether SGLang did: not while requests run."""
    _desk.resetting = True
    try:
        return bool(scheduler.flush_cache())
    finally:
        _desk.resetting = False


def after_flush(scheduler: Any, flushed: bool) -> None:
    """SGLang emptied device and host memory."""
    cache = scheduler.tree_cache
    if not flushed or not isinstance(cache, TieredRadixCache):
        return
    cache.fence.lift()
    config = TieredConfig.from_environment()
    wanted = config is not None and config.nvme is not None and config.nvme.flush_purges
    if wanted and cache.storage is not None and not _desk.resetting:
        cache.storage.begin_purge(None)
        cache.purge_warm_list(None)


def key_of_new_request(request: Any) -> None:
    if _desk.has_tiers:
        request.extra_key = key_of_request(request.extra_key, request.lora_id)
    if TieredRadixCache.fence:
        request.extra_key = TieredRadixCache.fence.key_of(request.extra_key, request.cache_salt)


def _report(cache: TieredRadixCache, number: str, limit: int) -> dict[str, Any]:
    """The tenants with most on NVMe; found on another thread, as there may be many."""
    storage = cache.storage
    if storage is None:
        return {"done": True, "tenants": []}
    if number not in _desk.reports:

        def work() -> list[dict[str, Any]]:
            found = storage.region_engine.tenants(limit)
            return [{**usage._asdict(), "tenant": usage.tenant.hex()} for usage in found]

        _remember(_desk.reports, number, _desk.submit(work))
    report = _desk.reports[number]
    return {"done": True, "tenants": report.result()} if report.done() else {"done": False}


def _remember(answers: OrderedDict[str, Any], number: str, answer: Any) -> None:
    answers[number] = answer
    if len(answers) > _MAX_ANSWERS:
        answers.popitem(last=False)
