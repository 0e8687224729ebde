"""How single pages are forgotten: hidden in memory at once, and kept out by their tombstone.

The bound of a tombstone lies a minute ahead of this clock, as other servers may go on storing a
page until they have read it, by clocks that are ahead. A page that is stored again by one that
knows the tombstone goes into an object whose name is later than the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.object.pending import StoreTicket
from sglang_tiered.storage.object.purging import drop_stores
from sglang_tiered.storage.promises import ended

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.object.pending import OpenObject
    from sglang_tiered.storage.object.state import ObjectState

__all__ = ["apply_forget", "begin_forget", "hide_pages"]

_MAX_SKEW_MS = 60_000


def begin_forget(state: ObjectState, keys: Sequence[bytes]) -> Future[bool]:
    """Forget pages, each key once. Memory only."""
    hide_pages(state, keys)
    return ended(False)


def hide_pages(state: ObjectState, keys: Sequence[bytes]) -> None:
    """Forget pages, each key once, for this engine alone: another server makes it durable."""
    with state.lock:
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
    _drop_stores_of(state, set(news), bound_ms)
    state.num_pages_purged += state.index.drop_pages(news, bound_ms)
    folded = state.forgotten.fold()
    if folded >= 0:  # rather forget pages than that they are forgotten
        state.bounds.collapse(folded)
        drop_stores(state, None, folded)
        state.num_pages_purged += state.index.drop_before(None, folded)


def _drop_stores_of(state: ObjectState, gone: set[bytes], bound_ms: int) -> None:
    for key in gone:
        state.pending.pop(key, None)
    tickets = [entry for entry in (*state.stores, state.packing) if isinstance(entry, StoreTicket)]
    for ticket in tickets:
        ticket.forgotten |= gone.intersection(ticket.job.run.keys)
    staged = [*state.open_objects.values(), *state.uploads]
    for each in staged:
        _take_out(state, each, gone)
    # What is dead by its name needs no more; the others' objects must not stay.
    for each in state.uploading:
        if each.object_id.unix_ms > bound_ms and any(row[0] in gone for row in each.rows):
            each.dropped = True
            state.settle(each, Reason.CANCELLED)
    for each in [each for each in state.uploads if not each.rows]:
        state.uploads.remove(each)


def _take_out(state: ObjectState, open_object: OpenObject, gone: set[bytes]) -> None:
    """Take pages out of an object that no uploader has; their bytes become zeros."""
    rows, entries = open_object.rows, open_object.entries
    kept = [at for at, row in enumerate(rows) if row[0] not in gone]
    if len(kept) == len(rows):
        return
    for (key, offset, stored, length, _), (ticket, position, _) in zip(rows, entries, strict=True):
        if key in gone:
            open_object.buffer[offset : offset + stored] = bytes(stored)
            open_object.staged_bytes -= length
            ticket.job.reasons[position] = Reason.CANCELLED
            state.settle_pages(ticket, [key], length)
    open_object.rows = [rows[at] for at in kept]
    open_object.entries = [entries[at] for at in kept]
