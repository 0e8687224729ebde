"""How single pages are hidden in memory, and who is told of tombstones.

The bound of a tombstone lies a minute ahead of this clock, as other servers may go on storing a
page until they have read it, by clocks that are ahead. A page that is stored again by one that
knows the tombstone goes into an object whose name is later than the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.storage.object.dropping import drop_stores, drop_stores_of_pages
from sglang_tiered.storage.object.format import MAX_FORGOTTEN_PAGES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang_tiered.storage.base import Erasure
    from sglang_tiered.storage.object.state import ObjectState, OnErased

__all__ = ["apply_forget", "bound_of_pages", "note", "set_owner", "tell"]

_MAX_SKEW_MS = 60_000
_TOLD_AT_ONCE = 64


def bound_of_pages(state: ObjectState, keys: Sequence[bytes]) -> int:
    """Return up to when objects do not count for pages that are erased now."""
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
    state.num_pages_erased += state.index.drop_pages(news, bound_ms)
    folded = state.forgotten.fold()
    if folded >= 0:  # rather forget pages than that they are forgotten
        state.bounds.collapse(folded)
        drop_stores(state, None, folded)
        state.num_pages_erased += state.index.drop_before(None, folded)


def note(state: ObjectState, what: Erasure) -> None:
    """Have the owner of the engine told of a tombstone. The caller holds the state's lock."""
    state.untold.append(what)
    if state.on_erased is not None:
        _bar(state, what)


def _bar(state: ObjectState, what: Erasure) -> None:
    state.barred.update((what.tenant,) if what.keys is None else what.keys)


def set_owner(state: ObjectState, told: OnErased) -> None:
    """Have ``told`` called with every tombstone, those that were read before too."""
    with state.lock:
        state.on_erased = told
        for what in state.untold:
            _bar(state, what)
        state.discovery_ready.notify_all()


def tell(state: ObjectState, *, only_many: bool = False) -> None:
    """Tell the owner, on the discovery thread, what it was not told of, many tombstones at once:
    it writes to its disk. Until it has erased a page in its other tiers none is stored here: it
    may have been read from there before. ``only_many``: there is more to come."""
    while True:
        with state.lock:
            told = state.on_erased
            if told is None:
                return
            if not state.untold:
                state.barred.clear()
                return
            batch: list[Erasure] = []
            num_keys = 0
            for what in state.untold:
                if _is_many(len(batch), num_keys):
                    break
                batch.append(what)
                num_keys += len(what.keys or ())
            if only_many and not _is_many(len(batch), num_keys):
                return
            for _ in batch:
                state.untold.popleft()
        told(batch)


def _is_many(num_tombstones: int, num_keys: int) -> bool:
    return num_tombstones >= _TOLD_AT_ONCE or num_keys >= MAX_FORGOTTEN_PAGES
