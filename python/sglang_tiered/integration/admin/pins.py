"""Pins of conversations in a scheduler process, for ``service``: what NVMe or the bucket keep.

A pin is refused on all ranks or on none; where one rank dies in between, the next pin of that name
settles it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_tiered.api import CallError
from sglang_tiered.integration.admin.calls import NO_NAMESPACE, UNKNOWN, outcome, polled, store_of
from sglang_tiered.integration.admin.conversations import (
    locate,
    num_known,
    recent_of,
    selector_of,
    tenant_of_body,
    tier_of,
)
from sglang_tiered.integration.admin.pin_notes import (
    PinNote,
    keepers,
    pinned_prefixes,
    pins_of_prefix,
    stored_name,
)
from sglang_tiered.storage.base import PinRefusal
from sglang_tiered.storage.promises import ended

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sglang_tiered.integration.admin.calls import Answer, Steps
    from sglang_tiered.integration.admin.conversations import Checkpoints
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache

__all__ = ["pin", "unpin"]

TOO_SHORT = "the prefix is shorter than a page of {} tokens, so there is nothing to pin"
NOTHING_HELD = (
    "no page of the prefix is in memory or a tier, so there is nothing to keep; pin it once it is "
    "computed"
)
NOT_WRITTEN = "the tier did not take the change of the pin; see the server's log, and ask again"
REFUSED_ELSEWHERE = "another rank of this server cannot pin so much; unpin something"


def pin(checkpoints: Checkpoints, cache: TieredRadixCache, _: str, body: dict[str, Any]) -> Steps:
    """Pin a conversation in a tier, and then make it durable there."""
    storage = store_of(cache)
    tier = tier_of(cache, storage, body.get("tier", "nvme"))
    selector = yield from selector_of(cache, body)
    if selector is None:
        return UNKNOWN
    located = locate(cache, selector)
    if not located.hashes:
        raise CallError(TOO_SHORT.format(cache.page_size))
    num_held = num_known(cache, storage, located)
    knows, most_held = yield [int(storage.knows_namespace), -num_held]
    if not knows:  # it would keep no page: none has a name yet
        raise CallError(NO_NAMESPACE, 503)
    if not most_held:  # none on any rank
        return {"done": True, "unknown": NOTHING_HELD}
    tenants = cache.hidden_tenants
    tenant = tenants.tenant_of(selector.extra_key, selector.cache_salt)
    conversation = _conversation(cache, body)
    name, ttl = body.get("name") or conversation or located.hashes[-1], body.get("ttl")
    until_s = None if ttl is None else body["now"] + ttl
    stored, keeper = stored_name(tenant, name), keepers(storage).get(tier)
    kept: Future[bool] | PinRefusal = ended(True)  # on a rank that borrows the pages of another
    if keeper is not None:
        adapter = tenants.adapter_of(selector.extra_key)
        note = PinNote.of(selector.tokens, conversation, adapter, body["now"])
        keys = storage.keys_of_pools(located.hashes)
        kept = keeper.pin(stored, keys, tenant, until_s, note.pack())

    (is_kept,) = yield [int(not isinstance(kept, PinRefusal))]
    if isinstance(kept, PinRefusal):
        raise CallError(kept.why, 409)
    if not is_kept:
        if keeper is not None:
            keeper.unpin(stored)
        raise CallError(REFUSED_ELSEWHERE, 409)
    values, answer = checkpoints.work(cache, storage, selector, tier)

    def report(least: list[int]) -> Answer:
        *of_checkpoint, is_kept, is_durable = least
        if is_kept and not is_durable:
            raise CallError(NOT_WRITTEN, 503)
        told = answer(of_checkpoint)
        done = told["done"] and bool(is_kept)
        return {**told, "name": name, "pinned_until": until_s, "done": done}

    return (yield from polled(lambda: [*values(), *outcome([kept])], report))


def unpin(cache: TieredRadixCache, _: str, body: dict[str, Any]) -> Steps:
    """Let a pin go, of a conversation all its pins."""
    here, names = keepers(store_of(cache)).values(), (yield from _stored_names(cache, body))
    has_any = any(keeper.has_pin(name) for keeper in here for name in names)
    if (yield [-int(has_any)]) == [0]:
        return UNKNOWN

    def report(least: list[int]) -> Answer:
        done, durable = least
        if done and not durable:
            raise CallError(NOT_WRITTEN, 503)
        return {"done": bool(done)}

    begun = [each.unpin(name) for each in here for name in names]
    return (yield from polled(partial(outcome, begun), report))


def _conversation(cache: TieredRadixCache, body: dict[str, Any]) -> str | None:
    """Return the id of the conversation that a body selects, if it has one."""
    recent = recent_of(cache, body) if "rid" in body else None
    found: str | None = body.get("conversation_id")
    return found if recent is None else recent.conversation


def _stored_names(cache: TieredRadixCache, body: dict[str, Any]) -> Steps:
    """Return the pins that a body names, as stores know them; none where its ``rid`` or
    ``conversation_id`` is not known, or names no page."""
    tenant = tenant_of_body(cache, body)
    if "name" in body:
        return [stored_name(tenant, body["name"])]
    if "conversation_id" in body:
        keys = body.get("extra_key"), body.get("cache_salt")
        found = yield from pinned_prefixes(cache, tenant, body["conversation_id"], *keys)
        return list(dict.fromkeys(name for name, _ in found))
    selector = yield from selector_of(cache, body)
    hashes = [] if selector is None else locate(cache, selector).hashes
    if selector is None or not hashes:
        return []
    tenant = cache.hidden_tenants.tenant_of(selector.extra_key, selector.cache_salt)
    unnamed = stored_name(tenant, _conversation(cache, body) or hashes[-1])
    named = yield from pins_of_prefix(cache, tenant, selector)
    return list(dict.fromkeys((unnamed, *named)))
