"""What is on its way into the bucket and must not arrive: erased or closed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.object.pending import StoreTicket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.object.pending import OpenObject
    from sglang_tiered.storage.object.state import ObjectState

__all__ = ["drop_stores", "drop_stores_of_pages"]


def drop_stores(
    state: ObjectState, tenant: bytes | None, bound_ms: int | None, but: Sequence[OpenObject] = ()
) -> None:
    """Keep what is on its way of a tenant (None: of anyone) invisible, but for some objects; with a
    bound, only what is in objects opened up to it. The caller holds the state's lock."""
    if bound_ms is None:
        if state.packing is not None and tenant in (None, state.packing.tenant):
            state.packing.dropped = True  # the packer finishes it
        kept = []
        for entry in state.stores:
            if isinstance(entry, StoreTicket) and tenant in (None, entry.tenant):
                entry.dropped = True
                state.refuse(entry, entry.positions, Reason.CANCELLED)
            else:
                kept.append(entry)
        state.stores.clear()
        state.stores.extend(kept)
    gone = [
        each
        for each in state.in_staging()
        if tenant in (None, each.tenant)
        and each not in but
        and (bound_ms is None or min(each.object_id.unix_ms, each.opened_ms) <= bound_ms)
    ]
    for each in gone:
        each.dropped = True
        state.settle(each, Reason.CANCELLED)
    state.open_objects = {k: each for k, each in state.open_objects.items() if not each.dropped}
    for each in [each for each in state.uploads if each.dropped]:
        state.uploads.remove(each)


def drop_stores_of_pages(state: ObjectState, gone: set[bytes], bound_ms: int) -> None:
    """Keep pages that are on their way invisible, other servers included. What is uploaded already
    is dead by the name of its object where that is not behind the bound. The caller holds the
    state's lock."""
    for key in gone:
        state.pending.pop(key, None)
    tickets = [entry for entry in (*state.stores, state.packing) if isinstance(entry, StoreTicket)]
    for ticket in tickets:
        ticket.forgotten |= gone.intersection(ticket.job.run.keys)
    staged = [*state.open_objects.values(), *state.uploads]
    for each in staged:
        _take_out(state, each, gone)
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
