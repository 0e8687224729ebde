"""How single pages are forgotten: hidden in memory at once, and kept out by their tombstone.

The bound of a tombstone lies a minute ahead of this clock, as other servers may go on storing a
page until they have read it, by clocks that are ahead. A page that is stored again by one that
knows the tombstone goes into an object whose name is later than the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.storage.base import NO_TENANT, JobKind
from sglang_tiered.storage.object.dropping import drop_stores, drop_stores_of_pages
from sglang_tiered.storage.object.format import MAX_FORGOTTEN_PAGES
from sglang_tiered.storage.object.pending import PurgeOrder
from sglang_tiered.storage.promises import all_true, ended

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Tombstone
    from sglang_tiered.storage.object.state import ObjectState, OnForgotten

__all__ = [
    "apply_forget",
    "begin_forget",
    "hide_pages",
    "note_tombstone",
    "set_owner",
    "tell",
]

_MAX_SKEW_MS = 60_000
_TOLD_AT_ONCE = 64


def begin_forget(
    state: ObjectState, keys: Sequence[bytes], local: Future[bool] | None
) -> Future[bool]:
    """Forget pages, each key once. Memory only."""
    if not keys:
        return ended(True)
    gone = set(keys)
    with state.lock:
        if state.closed:
            return ended(False)
        names = state.index.names_of(keys)
        uploading = [o for o in state.uploading if any(row[0] in gone for row in o.rows)]
        bound = _bound(state, keys)
        apply_forget(state, keys, bound)
        orders = []
        for start in range(0, len(keys), MAX_FORGOTTEN_PAGES):
            order = PurgeOrder(
                None,
                state.next_id(NO_TENANT)._replace(unix_ms=bound, tenant_tag=0),
                state.namespace,
                state.promises.make(),
                tuple(keys[start : start + MAX_FORGOTTEN_PAGES]),
                local=local,
            )
            orders.append(order)
        orders[-1].names, orders[-1].uploading = names, uploading
        state.purge_orders.extend(orders)
        state.discovery_ready.notify_all()
        # A store may go on for its other pages, of which an object waits to be full.
        loads = [job for job in state.jobs.inflight if job.kind is JobKind.LOAD]
        jobs = [job for job in loads if not gone.isdisjoint(job.run.keys)]
    return state.promises.watch(all_true([order.durable for order in orders], jobs))


def hide_pages(state: ObjectState, keys: Sequence[bytes]) -> None:
    """Forget pages, each key once, for this engine alone: another server makes it durable."""
    with state.lock:
        # What its owner is told of is hidden already, no further than its tombstone says.
        keys = [key for key in keys if key not in state.barred]
        if keys and not state.closed:
            apply_forget(state, keys, _bound(state, keys))


def _bound(state: ObjectState, keys: Sequence[bytes]) -> int:
    newest = max((name[:12] for name in state.index.names_of(keys)), default="0")
    return max(state.now_ms() + _MAX_SKEW_MS, int(newest, 16), state.forgotten.latest(keys) + 1)


def apply_forget(state: ObjectState, keys: Iterable[bytes], bound_ms: int) -> None:
    """Hide pages in objects that were opened up to then, and what is on its way of them: it may be
    from before. The caller holds the state's lock."""
    news = state.forgotten.add(keys, bound_ms)
    if not news:
        return
    state.pins.forget(news, bound_ms)
    drop_stores_of_pages(state, set(news), bound_ms)
    state.num_pages_purged += state.index.drop_pages(news, bound_ms)
    folded = state.forgotten.fold()
    if folded >= 0:  # rather forget pages than that they are forgotten
        state.bounds.collapse(folded)
        drop_stores(state, None, folded)
        state.num_pages_purged += state.index.drop_before(None, folded)


def note_tombstone(state: ObjectState, tombstone: Tombstone) -> None:
    """Have the owner of the engine told of a tombstone. The caller holds the state's lock."""
    state.untold.append(tombstone)
    if state.on_forgotten is not None:
        state.barred.update(tombstone.keys)


def set_owner(state: ObjectState, told: OnForgotten) -> None:
    """Have ``told`` called with every tombstone, those that were read before too."""
    with state.lock:
        state.on_forgotten = told
        for tombstone in state.untold:
            state.barred.update(tombstone.keys)
        state.discovery_ready.notify_all()


def tell(state: ObjectState, *, only_many: bool = False) -> None:
    """Tell the owner, on the discovery thread, what it was not told of, many tombstones at once:
    it writes to its disk. Until it has forgotten a page in its other tiers none is stored here: it
    may have been read from there before. ``only_many``: there is more to come."""
    while True:
        with state.lock:
            told = state.on_forgotten
            if told is None:
                return
            if not state.untold:
                state.barred.clear()
                return
            batch: list[Tombstone] = []
            num_keys = 0
            for tombstone in state.untold:
                if _is_many(len(batch), num_keys):
                    break
                batch.append(tombstone)
                num_keys += len(tombstone.keys)
            if only_many and not _is_many(len(batch), num_keys):
                return
            for _ in batch:
                state.untold.popleft()
        told(batch)


def _is_many(num_tombstones: int, num_keys: int) -> bool:
    return num_tombstones >= _TOLD_AT_ONCE or num_keys >= MAX_FORGOTTEN_PAGES
