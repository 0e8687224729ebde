"""``conversations``: those of a tenant in a scheduler process, a page at a time.

A row is a conversation by its id, or a request or a pin without one. Recent requests come first,
the newest first, and then what is pinned only. The scheduler thread matches a few prefixes in the
tree at each question; pins are counted, and pages hashed and looked up, on a thread. Every rank
lists the same: recent requests are alike on all of them, and of pins the first rank tells.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.runtime_context import get_parallel

from sglang_tiered.integration.admin.calls import has_ended, store_of
from sglang_tiered.integration.admin.conversations import key_of, tenant_of_body, tokens_in_memory
from sglang_tiered.integration.admin.pin_notes import (
    NO_NOTE,
    TOKEN_BYTES,
    PinNote,
    as_tokens,
    keepers,
    packed,
    stored_name,
    unpack,
    whole_pages,
)
from sglang_tiered.integration.identity.recent_requests import PrefixSelector
from sglang_tiered.integration.identity.tenants import key_of_request
from sglang_tiered.storage.base import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import ThreadPoolExecutor

    from sglang_tiered.integration.admin.calls import Steps
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.identity.recent_requests import Recent
    from sglang_tiered.integration.storage.backend import TieredStorage

__all__ = ["conversations"]

_STEP_ROWS, _STEP_TOKENS = 100, 1 << 18
"""What is matched in the tree at one question."""

_RECENT, _PINNED = "r", "p"
"""What a cursor begins with: then comes the number of the request, or the name of the pin."""


class _ListedRow(msgspec.Struct):
    """A conversation to list. ``tokens`` are those of a note where no recent request has them."""

    cursor: str  # behind which the next page begins
    id: str | None
    rid: str | None
    last_used_s: float | None
    pins: list[dict[str, Any]]
    adapter: str | None = None
    tokens: bytes = b""


@dataclass(slots=True)
class _PinnedRows:
    """The pins of a tenant on this rank, by the conversation they are of."""

    of_conversation: dict[str, _ListedRow]
    of_prefix: dict[tuple[str | None, bytes], list[_ListedRow]]  # by adapter and whole pages
    rows: list[_ListedRow]  # by their cursors


def conversations(
    worker: ThreadPoolExecutor, cache: TieredRadixCache, _: str, body: dict[str, Any]
) -> Steps:
    """Tell a page. Its pins are counted first, on the thread of ``worker``."""
    storage, page_size = store_of(cache), int(cache.page_size)
    tenant = tenant_of_body(cache, body)
    recents = _newest(cache.recent_requests.of_tenant(tenant), page_size)
    pinned = worker.submit(_pinned_rows, storage, tenant, page_size)
    while (yield [int(has_ended(pinned))]) == [0]:
        yield {"done": False}
        store_of(cache)
    chosen = _page(cache, body, recents, pinned.result())
    told = yield msgspec.msgpack.encode(chosen)  # as the first rank chose
    rows, has_more = msgspec.msgpack.decode(told, type=tuple[list[_ListedRow], bool])
    selectors = [_selector(cache, body, recents, row) for row in rows]
    counted = worker.submit(_count_tiers, cache, storage, selectors)
    in_memory: list[tuple[int, int]] = []  # device, host
    _match_some(cache, selectors, in_memory)
    while (yield [int(len(in_memory) == len(rows) and has_ended(counted))]) == [0]:
        yield {"done": False}
        store_of(cache)
        _match_some(cache, selectors, in_memory)
    of_rows = zip(in_memory, counted.result(), strict=True)
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
                "pins": row.pins,
            }
            for row, selector in zip(rows, selectors, strict=True)
        ],
        "next": rows[-1].cursor if has_more else None,
        "pinned_bytes": 0 if nvme is None else nvme.pinned_bytes,
        "pin_bound_bytes": 0 if nvme is None else nvme.pin_bound_bytes,
    }


def _selector(
    cache: TieredRadixCache, body: dict[str, Any], recents: dict[str, Recent], row: _ListedRow
) -> PrefixSelector:
    if row.rid is not None:
        return recents[row.rid].selector
    salt = body.get("cache_salt")
    key = key_of_request(body.get("extra_key"), row.adapter)
    key = cache.hidden_tenants.key_of(key, salt)
    return PrefixSelector(as_tokens(row.tokens), key, salt)


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
    cache: TieredRadixCache, body: dict[str, Any], recents: dict[str, Recent], pinned: _PinnedRows
) -> tuple[list[_ListedRow], bool]:
    """Return the rows behind the cursor, and whether there are more. Of ``recents``, by their
    ``rid``, the newest come first."""
    limit = int(body["limit"])
    after = body["after"].get(str(_rank()), _RECENT)
    if after is None:  # this replica has told all
        return [], False
    rows: list[_ListedRow] = []
    shown: set[str] = set()  # cursors of pins
    lengths = {len(tokens) for _, tokens in pinned.of_prefix}
    for recent in recents.values():
        of_id = pinned.of_conversation.get(recent.conversation or "")
        its = [] if of_id is None else [of_id]
        its += [row for row in _same_prefix(cache, recent, pinned, lengths) if row is not of_id]
        shown.update(row.cursor for row in its)
        is_behind = after == _RECENT or (
            after.startswith(_RECENT) and recent.number < int(after[1:])
        )
        if is_behind and len(rows) <= limit:
            rows.append(
                _ListedRow(
                    cursor=f"{_RECENT}{recent.number}",
                    id=recent.conversation,
                    rid=recent.rid,
                    last_used_s=recent.used_at_s,
                    pins=[pin for row in its for pin in row.pins],
                )
            )
    start = bisect_right(pinned.rows, after, key=lambda row: row.cursor)
    for row in pinned.rows[start if after.startswith(_PINNED) else 0 :]:
        if len(rows) > limit:
            break
        if row.cursor not in shown:
            rows.append(row)
    return rows[:limit], len(rows) > limit


def _same_prefix(
    cache: TieredRadixCache, recent: Recent, pinned: _PinnedRows, lengths: set[int]
) -> list[_ListedRow]:
    """Return the pins without a conversation that have the whole pages of a request."""
    tokens, page_size = recent.selector.tokens, int(cache.page_size)
    if len(tokens) // page_size * page_size * TOKEN_BYTES not in lengths:
        return []
    adapter = cache.hidden_tenants.adapter_of(recent.selector.extra_key)
    return pinned.of_prefix.get((adapter, whole_pages(packed(tokens), page_size)), [])


def _match_some(
    cache: TieredRadixCache, selectors: list[PrefixSelector], in_memory: list[tuple[int, int]]
) -> None:
    """Count what memory holds of the next rows, of as many on every rank."""
    num_left = _STEP_TOKENS
    for selector in selectors[len(in_memory) :][:_STEP_ROWS]:
        if num_left <= 0:
            return
        num_left -= len(selector.tokens)
        in_memory.append(tokens_in_memory(cache, selector))


def _pinned_rows(storage: TieredStorage, tenant: bytes, page_size: int) -> _PinnedRows:
    """Return the pins of a tenant, as this rank has them. On the thread, as they are counted."""
    prefix = stored_name(tenant, "")
    groups: dict[str, list[tuple[PinNote, dict[str, Any]]]] = {}
    pins = [(tier, info) for tier, keeper in keepers(storage).items() for info in keeper.pins()]
    for tier, info in pins:
        if info.tenant != tenant:
            continue
        note = unpack(info.data) or NO_NOTE
        name = info.name.removeprefix(prefix)
        shown = {
            "name": name,
            "tier": tier.value,
            "bytes": info.physical_bytes,
            "pinned_until": info.until_s,
        }
        key = f"i{note.conversation}" if note.conversation is not None else f"n{name}"
        groups.setdefault(key, []).append((note, shown))
    rows = []
    of_prefix: dict[tuple[str | None, bytes], list[_ListedRow]] = {}
    for key in sorted(groups):
        newest = max((note for note, _ in groups[key]), key=lambda note: note.pinned_at_s)
        rows.append(
            _ListedRow(
                cursor=_PINNED + key,
                id=newest.conversation,
                rid=None,
                last_used_s=None,
                pins=[shown for _, shown in groups[key]],
                adapter=newest.adapter,
                tokens=newest.tokens,
            )
        )
        pages = whole_pages(newest.tokens, page_size)
        if newest.conversation is None and pages:
            of_prefix.setdefault((newest.adapter, pages), []).append(rows[-1])
    return _PinnedRows({row.id: row for row in rows if row.id is not None}, of_prefix, rows)


def _count_tiers(
    cache: TieredRadixCache, storage: TieredStorage, selectors: list[PrefixSelector]
) -> list[list[int]]:
    """Count the leading tokens of each prefix by tier. On the thread."""
    page_size = int(cache.page_size)
    hashes = (cache.page_hashes(key_of(cache, selector)) for selector in selectors)
    return [[n * page_size for n in storage.pages_by_tier(each).values()] for each in hashes]
