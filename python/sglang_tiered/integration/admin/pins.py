"""Pins of conversations in a scheduler process, for ``service``: what NVMe or the bucket keep.

As with checkpoints every rank gets the same messages in the same order, and answers for its own
part of each page. A pin is refused on all ranks or on none; where one rank dies in between, the
next pin of that name settles it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_tiered.integration.admin.conversations import (
    NO_OBJECT_TIER,
    Checkpoints,
    PendingRequests,
    locate,
    names_prefix,
    num_known,
    recent_of,
    refused,
    selector_of,
    tenant_of_body,
    without_store,
)
from sglang_tiered.integration.admin.pin_notes import (
    PinNote,
    keepers,
    pinned_prefixes,
    pins_of_prefix,
    stored_name,
)
from sglang_tiered.integration.ranks import least_on_every_rank
from sglang_tiered.storage.base import PinRefusal, Tier
from sglang_tiered.storage.promises import all_true

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.identity.recent_requests import PrefixSelector
    from sglang_tiered.integration.storage.backend import TieredStorage

__all__ = ["Pins"]

TOO_SHORT = "the prefix is shorter than a page of {} tokens, so there is nothing to pin"
NOTHING_HELD = (
    "no page of the prefix is in memory or a tier, so there is nothing to keep; pin it once it is "
    "computed"
)
NOT_WRITTEN = "the tier did not take the change of the pin; see the server's log, and ask again"
REFUSED_ELSEWHERE = "another rank of this server cannot pin so much; unpin something"


@dataclass(slots=True)
class _PinWork:
    name: str
    stored_name: str
    tier: Tier
    until_s: float | None
    refusal: PinRefusal | None = None
    kept: Future[bool] | None = None  # None on a rank that borrows the pages of another


class Pins:
    """The pins of one scheduler process. Scheduler thread only; the store keeps them."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._begun: PendingRequests[_PinWork] = PendingRequests()
        self._let_go: PendingRequests[Future[bool]] = PendingRequests()

    def pin(self, cache: TieredRadixCache, number: str, body: dict[str, Any]) -> dict[str, Any]:
        """Begin to pin a conversation in a tier and to make it durable there, or report how far
        that is."""
        storage = cache.storage
        if storage is None:
            return without_store(cache)
        body = {"tier": Tier.NVME.value, **body}
        if number not in self._begun:
            if not names_prefix(body):  # a later question, and it was dropped
                return refused("too many pins at once; ask again", 503)
            if body["tier"] == Tier.OBJECT.value and not storage.has_object_tier:
                return refused(NO_OBJECT_TIER)
            selector = selector_of(cache, body)
            if selector is None:
                return {"done": True, "unknown": True}
            located = locate(cache, selector)
            if not located.hashes:
                return refused(TOO_SHORT.format(cache.page_size))
            num_held = num_known(cache, storage, located)
            knows, least = least_on_every_rank(cache, [int(storage.knows_namespace), -num_held])
            if knows and not least:  # none on any rank, and the tiers could tell
                return {"done": True, "unknown": NOTHING_HELD}
            self._begun[number] = _begin(cache, storage, selector, located.hashes, body)
        return self._report(cache, storage, number, body)

    def _report(
        self, cache: TieredRadixCache, storage: TieredStorage, number: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        entry = self._begun[number]
        (is_taken,) = least_on_every_rank(cache, [int(entry.refusal is None)])
        if not is_taken:
            keeper = keepers(storage).get(entry.tier)
            if entry.kept is not None and keeper is not None:
                keeper.unpin(entry.stored_name)  # where it was refused, an earlier one stays
                entry.kept = None
            why = REFUSED_ELSEWHERE if entry.refusal is None else entry.refusal.why
            return refused(why, 409)
        report = self._checkpoints.answer(cache, number, body)
        if "error" in report:
            return report
        is_kept = entry.kept is None or entry.kept.done()
        is_durable = is_kept and (entry.kept is None or entry.kept.result())
        kept, durable = least_on_every_rank(cache, [int(is_kept), int(is_durable)])
        report["done"] = report["done"] and bool(kept)
        if kept and not durable:
            return refused(NOT_WRITTEN, 503)
        return {**report, "name": entry.name, "pinned_until": entry.until_s}

    def unpin(self, cache: TieredRadixCache, number: str, body: dict[str, Any]) -> dict[str, Any]:
        """Let a pin go, of a conversation all its pins, or report how far that is."""
        storage = cache.storage
        if storage is None:
            return without_store(cache)
        if number not in self._let_go:
            here, names = keepers(storage).values(), _stored_names(cache, body)
            has_any = any(keeper.has_pin(name) for keeper in here for name in names)
            if least_on_every_rank(cache, [-int(has_any)]) == [0]:
                return {"done": True, "unknown": True}
            self._let_go[number] = all_true([each.unpin(name) for each in here for name in names])
        gone = self._let_go[number]
        done, durable = least_on_every_rank(
            cache, [int(gone.done()), int(gone.done() and gone.result())]
        )
        if done and not durable:
            return refused(NOT_WRITTEN, 503)
        return {"done": bool(done)}


def _begin(
    cache: TieredRadixCache,
    storage: TieredStorage,
    selector: PrefixSelector,
    hashes: list[str],
    body: dict[str, Any],
) -> _PinWork:
    tenants = cache.hidden_tenants
    tenant = tenants.tenant_of(selector.extra_key, selector.cache_salt)
    conversation = _conversation(cache, body)
    name, ttl = body.get("name") or conversation or hashes[-1], body.get("ttl")
    until_s = None if ttl is None else body["now"] + ttl
    entry = _PinWork(name, stored_name(tenant, name), Tier(body["tier"]), until_s)
    keeper = keepers(storage).get(entry.tier)
    if keeper is None:
        return entry
    adapter = tenants.adapter_of(selector.extra_key)
    note = PinNote.of(selector.tokens, conversation, adapter, body["now"])
    keys = storage.keys_of_pools(hashes)
    outcome = keeper.pin(entry.stored_name, keys, tenant, until_s, note.pack())
    if isinstance(outcome, PinRefusal):
        entry.refusal = outcome
    else:
        entry.kept = outcome
    return entry


def _conversation(cache: TieredRadixCache, body: dict[str, Any]) -> str | None:
    """Return the id of the conversation that a body selects, if it has one."""
    recent = recent_of(cache, body) if "rid" in body else None
    found: str | None = body.get("conversation_id")
    return found if recent is None else recent.conversation


def _stored_names(cache: TieredRadixCache, body: dict[str, Any]) -> list[str]:
    """Return the pins that a body names, as stores know them; none where its ``rid`` or
    ``conversation_id`` is not known, or names no page. Alike on all ranks."""
    tenant = tenant_of_body(cache, body)
    if "name" in body:
        return [stored_name(tenant, body["name"])]
    if "conversation_id" in body:
        keys = body.get("extra_key"), body.get("cache_salt")
        found = pinned_prefixes(cache, tenant, body["conversation_id"], *keys)
        return list(dict.fromkeys(name for name, _ in found))
    selector = selector_of(cache, body)
    hashes = [] if selector is None else locate(cache, selector).hashes
    if selector is None or not hashes:
        return []
    tenant = cache.hidden_tenants.tenant_of(selector.extra_key, selector.cache_salt)
    unnamed = stored_name(tenant, _conversation(cache, body) or hashes[-1])
    return list(dict.fromkeys((unnamed, *pins_of_prefix(cache, tenant, selector))))
