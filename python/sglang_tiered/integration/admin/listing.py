"""``conversations``: those of a tenant in a scheduler process, a page at a time; and ``tenants``.

A row is a conversation by its id, or a request or a pin without one. Recent requests come first,
the newest first, and then what is pinned only. The scheduler thread matches a few prefixes in the
tree at each question; rows are chosen, and pages hashed and looked up, on a thread. Every rank
lists the same: recent requests are alike on all of them, and of pins the first rank tells.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.runtime_context import get_parallel

from sglang_tiered.api import ConversationPin
from sglang_tiered.integration.admin.calls import is_detached, on_thread, store_of
from sglang_tiered.integration.admin.prefixes import (
    NO_NOTE,
    Pages,
    PinNote,
    keepers,
    key_of,
    locate,
    pages_of,
    stored_name,
    tenant_of_body,
    unpack,
)
from sglang_tiered.storage.base import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tiered.integration.admin.calls import Steps
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.identity.recent_requests import PrefixSelector, Recent
    from sglang_tiered.integration.storage.backend import TieredStorage


_STEP_ROWS, _STEP_TOKENS = 100, 1 << 18
"""What is matched in the tree at one question."""

_RECENT, _PINNED = "r", "p"
"""What a cursor begins with: then comes the number of the request, or the name of the pin."""


class _ListedRow(msgspec.Struct):
    """A conversation to list: by its ``rid``, or else by what its newest pin notes."""

    cursor: str  # behind which the next page begins
    id: str | None
    pins: list[ConversationPin]
    rid: str | None = None
    last_used_s: float | None = None
    note: PinNote = NO_NOTE


def tenants(cache: TieredRadixCache, _: str, body: dict[str, Any]) -> Steps:
    """Count the tenants with most on NVMe."""
    storage = store_of(cache) if is_detached(cache) else cache.storage
    if storage is None:
        return {"done": True, "tenants": []}
    found = yield from on_thread(cache, partial(storage.region_engine.tenants, int(body["limit"])))
    told = [{**usage._asdict(), "tenant": usage.tenant.hex()} for usage in found]
    return {"done": True, "tenants": told}


def conversations(cache: TieredRadixCache, _: str, body: dict[str, Any]) -> Steps:
    """Tell a page."""
    storage, tenant = store_of(cache), tenant_of_body(cache, body)
    recents = _newest(cache.recent_requests.of_tenant(tenant), int(cache.page_size))
    chosen = yield from on_thread(cache, partial(_page, cache, storage, tenant, body, recents))
    told = yield msgspec.msgpack.encode(chosen)  # as the first rank chose
    rows, has_more = msgspec.msgpack.decode(told, type=tuple[list[_ListedRow], bool])
    selectors = [
        row.note.prefix(cache, body) if row.rid is None else recents[row.rid].selector
        for row in rows
    ]
    in_memory: list[tuple[int, ...]] = []  # device, host
    num_left = _STEP_TOKENS
    for selector in selectors:
        if num_left <= 0:
            yield {"done": False}
            num_left = _STEP_TOKENS
        num_left -= max(len(selector.tokens), _STEP_TOKENS // _STEP_ROWS)
        in_memory.append(locate(cache, selector)[2:])
    counted = yield from on_thread(cache, partial(_count_tiers, cache, storage, selectors))
    of_rows = zip(in_memory, counted, strict=True)
    number = iter((yield [count for held, stored in of_rows for count in (*held, *stored)]))
    names = ["device", "host", *(tier.value for tier in storage.pages_by_tier([]))]
    nvme = keepers(storage).get(Tier.NVME)
    return {
        "done": True,
        "rank": _rank(),
        "conversations": [
            {
                "id": row.id,
                "rid": row.rid,
                "num_tokens": len(selector.tokens),
                **{name: next(number) for name in names},
                "last_used": row.last_used_s,
                "pins": msgspec.to_builtins(row.pins),
            }
            for row, selector in zip(rows, selectors, strict=True)
        ],
        "next": rows[-1].cursor if has_more else None,
        "pinned_bytes": 0 if nvme is None else nvme.pinned_bytes,
        "pin_bound_bytes": 0 if nvme is None else nvme.pin_bound_bytes,
    }


def _rank() -> int:
    return get_parallel().dp_rank or 0


def _newest(recents: Iterable[Recent], page_size: int) -> dict[str, Recent]:
    """Return the newest request of each conversation, and all that have none, of those that a tier
    can hold. A check of health, or a first word, has no whole page."""
    seen: set[str | None] = set()
    found = {}
    for recent in recents:
        if len(recent.selector.tokens) >= page_size and recent.conversation not in seen:
            found[recent.rid] = recent
            seen |= {recent.conversation} - {None}
    return found


def _page(
    cache: TieredRadixCache,
    storage: TieredStorage,
    tenant: bytes,
    body: dict[str, Any],
    recents: dict[str, Recent],
) -> tuple[list[_ListedRow], bool]:
    """Return the rows behind the cursor, and whether there are more. Of ``recents``, by their
    ``rid``, the newest come first. On the thread."""
    limit = int(body["limit"])
    after = body["after"].get(str(_rank()), _RECENT)
    if after is None:  # this replica has told all
        return [], False
    pinned = _pinned_rows(storage, tenant)
    of_id = {row.id: row for row in pinned if row.id is not None}
    of_pages: dict[Pages, list[_ListedRow]] = {}  # of pins without a conversation
    for row in pinned:
        pages = row.note.pages(int(cache.page_size))
        if row.id is None and pages[1]:
            of_pages.setdefault(pages, []).append(row)
    rows: list[_ListedRow] = []
    shown: set[str] = set()  # cursors of pins
    for recent in recents.values():
        its = of_pages.get(pages_of(cache, recent.selector), []) if of_pages else []
        if recent.conversation in of_id:
            its = [of_id[recent.conversation], *its]
        shown.update(row.cursor for row in its)
        is_behind = after == _RECENT or (
            after.startswith(_RECENT) and recent.number < int(after[1:])
        )
        if is_behind and len(rows) <= limit:
            pins = [pin for row in its for pin in row.pins]
            cursor = f"{_RECENT}{recent.number}"
            rows.append(_ListedRow(cursor, recent.conversation, pins, recent.rid, recent.used_at_s))
    start = bisect_right(pinned, after, key=lambda row: row.cursor)
    for row in pinned[start if after.startswith(_PINNED) else 0 :]:
        if len(rows) > limit:
            break
        if row.cursor not in shown:
            rows.append(row)
    return rows[:limit], len(rows) > limit


def _pinned_rows(storage: TieredStorage, tenant: bytes) -> list[_ListedRow]:
    """Return the pins of a tenant on this rank, by the conversation they are of, in the order of
    their cursors. On the thread."""
    prefix = stored_name(tenant, "")
    groups: dict[str, list[tuple[PinNote, ConversationPin]]] = {}
    for tier, keeper in keepers(storage).items():
        for info in keeper.pins():
            if info.tenant != tenant:
                continue
            note = unpack(info.data) or NO_NOTE
            name = info.name.removeprefix(prefix)
            shown = ConversationPin(name, tier.value, info.physical_bytes, info.until_s)
            key = f"i{note.conversation}" if note.conversation is not None else f"n{name}"
            groups.setdefault(_PINNED + key, []).append((note, shown))
    rows = []
    for cursor in sorted(groups):
        newest = max((note for note, _ in groups[cursor]), key=lambda note: note.pinned_at_s)
        pins = [shown for _, shown in groups[cursor]]
        rows.append(_ListedRow(cursor, newest.conversation, pins, note=newest))
    return rows


def _count_tiers(
    cache: TieredRadixCache, storage: TieredStorage, selectors: list[PrefixSelector]
) -> list[list[int]]:
    """Count the leading tokens of each prefix by tier. On the thread."""
    page_size = int(cache.page_size)
    hashes = (cache.page_hashes(key_of(cache, selector)) for selector in selectors)
    return [[n * page_size for n in storage.pages_by_tier(each).values()] for each in hashes]
