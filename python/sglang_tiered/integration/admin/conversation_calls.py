"""What calls do with a conversation in a scheduler process, for ``service``: pin it in NVMe or the
bucket, forget it, load it ahead.

A pin is refused on all ranks or on none: they ask before any takes it, in the place of another of
its name. Where one cannot any more once all have asked, the next pin of that name settles it.
Whether what is forgotten is so durably, and known to every other server, is asked afterwards. A
hint begins on all ranks in one step, and all load the same tokens: the least that any rank's tiers
hold. What then becomes of it is ``Hints``' affair.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.runtime_context import get_parallel

from sglang_tiered.api import CallError
from sglang_tiered.budgets import MAX_KEYS, WINDOW_S, ForgetAllowance
from sglang_tiered.integration.admin.calls import (
    DETACHED,
    NO_NAMESPACE,
    UNKNOWN,
    is_detached,
    outcome,
    store_of,
)
from sglang_tiered.integration.admin.conversations import (
    NOT_WRITTEN,
    erasure_of,
    key_of,
    locate,
    num_known,
    prefix_of_body,
    prefixes_of_body,
    tenant_of_body,
    tier_of,
    until_durable,
)
from sglang_tiered.integration.admin.pin_notes import (
    PinNote,
    keepers,
    pins_of_conversation,
    pins_of_prefix,
    stored_name,
)
from sglang_tiered.integration.cache.hints import Hint, chain_of
from sglang_tiered.storage.base import PinRefusal
from sglang_tiered.storage.promises import ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.integration.admin.calls import Steps
    from sglang_tiered.integration.cache.hints import Chain, Hints
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.identity.recent_requests import PrefixSelector
    from sglang_tiered.integration.storage.backend import TieredStorage


TOO_SHORT = "the prefix is shorter than a page of {} tokens, so there is nothing to pin"
NOTHING_HELD = (
    "no page of the prefix is in memory or a tier, so there is nothing to keep; pin it once it is "
    "computed"
)
NO_PIN = "there is no such pin"
REFUSED_ELSEWHERE = "another rank of this server cannot pin so much; unpin something"

STAGED = (
    "the pages are hidden, and the first stage has forgotten them for good, but with --pp-size "
    "above 1 nobody can tell that of the others"
)

NOT_HERE = (
    "this server loads nothing ahead: it runs with pipeline parallelism, without tiers, or a "
    "hybrid model with little host memory"
)


def pin(cache: TieredRadixCache, _: str, body: dict[str, Any]) -> Steps:
    """Pin a conversation in a tier, and then make it durable there."""
    storage = store_of(cache)
    tier = tier_of(cache, storage, body.get("tier", "nvme"))
    named = yield from prefix_of_body(cache, body)
    if named is None:
        return UNKNOWN
    selector, located = named.selector, locate(cache, named.selector)
    hashes = cache.page_hashes(located.key)
    if not hashes:
        raise CallError(TOO_SHORT.format(cache.page_size))
    num_held = num_known(cache, storage, located, hashes)
    knows, most_held = yield [int(storage.knows_namespace), -num_held]
    if not knows:  # it would keep no page: none has a name yet
        raise CallError(NO_NAMESPACE, 503)
    if not most_held:  # none on any rank
        return {"done": True, "unknown": NOTHING_HELD}
    name, ttl = body.get("name") or named.conversation or hashes[-1], body.get("ttl")
    until_s = None if ttl is None else body["now"] + ttl
    adapter = cache.hidden_tenants.adapter_of(selector.extra_key)
    note = PinNote.of(selector.tokens, named.conversation, adapter, body["now"]).pack()
    keys = storage.keys_of_pools(hashes)
    wanted = stored_name(named.tenant, name), keys, named.tenant, until_s, note
    keeper = keepers(storage).get(tier)  # none on a rank that borrows the pages of another
    refusal = None if keeper is None else keeper.pin(*wanted, only_asks=True)
    (may_pin,) = yield [int(not isinstance(refusal, PinRefusal))]
    if isinstance(refusal, PinRefusal):
        raise CallError(refusal.why, 409)
    if not may_pin:
        raise CallError(REFUSED_ELSEWHERE, 409)
    kept = ended(True) if keeper is None else keeper.pin(*wanted)
    if isinstance(kept, PinRefusal):  # since it was asked: the one before is still there
        kept = ended(False)
    told = {"name": name, "pinned_until": until_s}
    return (yield from until_durable(cache, storage, named, tier, kept, **told))


def unpin(cache: TieredRadixCache, _: str, body: dict[str, Any]) -> Steps:
    """Let a pin go, of a conversation all its pins."""
    here, names = keepers(store_of(cache)).values(), (yield from _stored_names(cache, body))
    has_any = any(keeper.has_pin(name) for keeper in here for name in names)
    if (yield [-int(has_any)]) == [0]:
        return {"done": True, "unknown": NO_PIN}
    begun = [each.unpin(name) for each in here for name in names]
    while True:
        done, durable = yield outcome(begun)
        if done and not durable:
            raise CallError(NOT_WRITTEN, 503)
        yield {"done": bool(done)}


def _stored_names(cache: TieredRadixCache, body: dict[str, Any]) -> Steps:
    """Return the pins that a body names, as stores know them; none where its ``rid`` or
    ``conversation_id`` is not known, or names no page."""
    tenant, names = tenant_of_body(cache, body), []
    if "name" in body:
        return [stored_name(tenant, body["name"])]
    if "conversation_id" in body:
        found = yield from pins_of_conversation(cache, tenant, body["conversation_id"])
    else:
        named = yield from prefix_of_body(cache, body)
        hashes = [] if named is None else cache.page_hashes(key_of(cache, named.selector))
        if named is None or not hashes:
            return []
        names = [stored_name(named.tenant, named.conversation or hashes[-1])]
        found = yield from pins_of_prefix(cache, named.tenant, named.selector)
    return list(dict.fromkeys([*names, *(name for name, _ in found)]))


class Forgets:
    """What one scheduler process has forgotten in the last hour. Pages that are forgotten again
    within it, as by one who asks until it is durable, have an allowance of their own: that takes
    nothing of what others may forget. Scheduler thread only."""

    def __init__(self, max_pages: int = MAX_KEYS) -> None:
        self._allowance, self._again = ForgetAllowance(max_pages), ForgetAllowance(max_pages)
        self._pages: dict[str, float] = {}  # when they were, the oldest first

    def spend(self, pages: Sequence[str]) -> Steps:
        """Note that pages are forgotten, on all ranks or on none. Raises ``CallError``."""
        if not pages:
            return
        now = time.monotonic()
        while self._pages and (oldest := next(iter(self._pages.items())))[1] + WINDOW_S <= now:
            del self._pages[oldest[0]]
        new = [page for page in pages if page not in self._pages]
        spent = [(self._allowance, len(new)), (self._again, len(pages) - len(new))]
        asked = f"these are {len(pages):,} pages, and a server forgets {MAX_KEYS:,} in an hour"
        if math.isinf(self._allowance.wait_s(len(pages), now)):
            raise CallError(f"{asked}: use a purge of the tenant", 503)
        wait_s = max(allowance.wait_s(num, now) for allowance, num in spent)
        (least,) = yield [-math.ceil(wait_s)]
        if least:
            wait = f"use a purge of the tenant, or ask again after {-least} s"
            raise CallError(f"{asked}: {wait}", 503)
        for allowance, num in spent:
            allowance.take(num, now)
        self._pages.update(dict.fromkeys(new, now))


def forget(spent: Forgets, cache: TieredRadixCache, number: str, body: dict[str, Any]) -> Steps:
    """Forget a conversation behind its first ``keep_tokens``, or the pages with these
    ``hashes``."""
    page_size = int(cache.page_size)
    num_kept = -(-int(body.get("keep_tokens", 0)) // page_size)
    selectors: list[PrefixSelector] = []
    hashes: list[str] = body.get("hashes", [])
    if "hashes" not in body:
        prefixes = yield from prefixes_of_body(cache, body)
        selectors = _longest([each.selector for each in prefixes])
        if not selectors:
            return UNKNOWN
        behind = (_pages_behind(cache, each, num_kept) for each in selectors)
        hashes = list(dict.fromkeys(page for pages in behind for page in pages))
    yield from spent.spend(hashes)
    begun = cache.erase(erasure_of(number, hashes=hashes)) if hashes else []
    if is_detached(cache):
        raise CallError(DETACHED, 503)
    # For the replicas that do not know the rid; once, as they may be megabytes.
    is_told = not selectors or "input_ids" in body or get_parallel().num_dp_ranks == 1
    report = {"done": False, "durable": False, "num_tokens": len(hashes) * page_size}
    if not is_told:
        yield {**report, "hashes": hashes}
    while True:
        done, durable = map(bool, (yield outcome(begun)))
        if durable:  # until then the caller may name it again
            recents, original = cache.recent_requests, cache.hidden_tenants.original
            recents.forget(selectors, num_kept * page_size, page_size, original)
            if cache.pp_size > 1 and hashes:
                raise CallError(STAGED, 503)
        yield {**report, "done": done, "durable": durable}


def _longest(selectors: list[PrefixSelector]) -> list[PrefixSelector]:
    """Return those that are not the beginning of another one, as most turns of a conversation
    are of the next."""
    # In the order of their bytes a beginning comes right before those that go on from it.
    ordered = sorted((repr(each[1:]), each.tokens.tobytes(), n) for n, each in enumerate(selectors))
    return [
        selectors[number]
        for (keys, tokens, number), (next_keys, next_tokens, _) in pairwise(
            [*ordered, ("", b"", 0)]
        )
        if keys != next_keys or not next_tokens.startswith(tokens)
    ]


def _pages_behind(cache: TieredRadixCache, selector: PrefixSelector, num_kept: int) -> list[str]:
    key = key_of(cache, selector)  # of now: what a purge has hidden matches nothing anyway
    pages = cache.page_hashes(key)
    if num_kept and len(pages) > num_kept:
        # The tree cuts its nodes where a match ends: what is kept can be stored by itself.
        cache.match_visible(key[: num_kept * int(cache.page_size)])
    return pages[num_kept:]


def prefetch(cache: TieredRadixCache, _: str, body: dict[str, Any]) -> Steps:
    """Bring a conversation to host memory."""
    storage, tiering = store_of(cache), cache.tiering
    if tiering is None or cache.buffer_pipeline is not None:
        raise CallError(NOT_HERE)
    hints, named = tiering.hints, (yield from prefix_of_body(cache, body))
    if named is None:
        return UNKNOWN
    tokens, extra_key, cache_salt = named.selector
    extra_key = cache.hidden_tenants.key_of(extra_key, cache_salt)
    chain = chain_of(cache, tokens, extra_key, cache_salt)
    hint: Hint = yield from _begin(cache, storage, hints, chain)
    del body, named, tokens, chain  # long, and kept for as long as nobody asks again
    while True:  # hints are alike on all ranks
        store_of(cache)
        if hint.why_dropped:
            hints.told(hint)
            raise CallError(hint.why_dropped, 503)
        yield {
            "done": not hint.is_active,
            "num_tokens": hint.num_pages * int(cache.page_size),
            "num_in_memory": hint.num_in_memory,
            "num_loading": hint.num_loading,
        }


def _begin(cache: TieredRadixCache, storage: TieredStorage, hints: Hints, chain: Chain) -> Steps:
    """Return the hint for a chain, a new one unless there is one. Raises ``CallError``."""
    if not chain.hashes:
        return Hint(chain, 0, 0)
    earlier = hints.get(chain)
    if earlier is not None and (earlier.is_active or earlier.why_dropped):
        return earlier
    page_size = int(cache.page_size)
    end = len(chain.hashes) * page_size
    match = cache.match_prefix(MatchPrefixParams(key=chain.key_in(cache, end)))
    start = int(match.device_prefix_len + match.host_hit_length)
    spans = storage.lookup_spans(chain.hashes[start // page_size :])
    num_held = sum(span.num_pages for span in spans) * page_size
    knows, num_held = yield [int(storage.knows_namespace), num_held]
    if not knows:
        raise CallError(NO_NAMESPACE, 503)
    if num_held < cache.prefetch_threshold:
        return Hint(chain, start, start)
    hint = hints.begin(chain, start, start + num_held)
    if hint is None:
        raise CallError(hints.why_no_room(), 503)
    return hint
