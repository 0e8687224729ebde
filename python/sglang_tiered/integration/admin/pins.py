"""Pins of conversations in a scheduler process, for ``service``: what reclaim keeps on NVMe.

As with checkpoints every rank gets the same messages in the same order, and answers for its own
part of each page. A pin is refused on all ranks or on none; where one rank dies in between, the
next pin of that name settles it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_tiered.integration.admin.conversations import (
    NO_STORE,
    Checkpoints,
    PendingRequests,
    locate,
    refused,
    selector_of,
)
from sglang_tiered.integration.identity.tenants import key_of_request
from sglang_tiered.integration.ranks.rank_consensus import least_on_every_rank
from sglang_tiered.storage.base import Tier
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.pinning.pins import PinRefusal

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.storage.backend import TieredStorage

__all__ = ["Pins", "list_pins", "tenant_of_body"]

TOO_SHORT = "the prefix is shorter than a page of {} tokens, so there is nothing to pin"
NOT_WRITTEN = "the pin could not be written to the disk; see the server's log, and ask again"
REFUSED_ELSEWHERE = "another rank of this server cannot pin so much; unpin something"


@dataclass(slots=True)
class _Pin:
    name: str
    stored_name: str
    until_s: float | None
    refusal: PinRefusal | None = None
    kept: Future[bool] | None = None  # None on a rank that borrows the pages of another


class Pins:
    """The pins of one scheduler process. Scheduler thread only; the store keeps them."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._begun: PendingRequests[_Pin] = PendingRequests()

    def pin(self, cache: TieredRadixCache, number: str, body: dict[str, Any]) -> dict[str, Any]:
        """Begin to pin a conversation and to make it durable on NVMe, or report how far that is."""
        storage = cache.storage
        if storage is None:
            return refused(NO_STORE)
        body = {**body, "tier": Tier.NVME.value} if len(body) > 1 else body
        if number not in self._begun:
            if len(body) == 1:  # a later question, and it was dropped
                return refused("too many pins at once; ask again", 503)
            selector = selector_of(cache, body)
            if selector is None:
                return {"done": True, "unknown": True}
            hashes = locate(cache, selector).hashes
            if not hashes:
                return refused(TOO_SHORT.format(cache.page_size))
            tenant = cache.purged_tenants.tenant_of(selector.extra_key, selector.cache_salt)
            name, ttl = body.get("name") or hashes[-1], body.get("ttl")
            until_s = None if ttl is None else body["now"] + ttl
            entry = _Pin(name, _stored(tenant, name), until_s)
            engine = storage.region_engine
            if isinstance(engine, RegionEngine):
                keys = storage.keys_of_pools(hashes)
                data = msgspec.json.encode(len(hashes) * int(cache.page_size))
                outcome = engine.pin(entry.stored_name, keys, tenant, until_s, data)
                if isinstance(outcome, PinRefusal):
                    entry.refusal = outcome
                else:
                    entry.kept = outcome
            self._begun[number] = entry
        return self._report(cache, storage, number, body)

    def _report(
        self, cache: TieredRadixCache, storage: TieredStorage, number: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        entry = self._begun[number]
        (is_taken,) = least_on_every_rank(cache, [int(entry.refusal is None)])
        if not is_taken:
            engine = storage.region_engine
            if entry.kept is not None and isinstance(engine, RegionEngine):
                engine.unpin(entry.stored_name)  # where it was refused, an earlier one stays
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
        """Let a pin go, or report how far that is."""
        storage = cache.storage
        if storage is None:
            return refused(NO_STORE)
        if number not in self._begun:
            named = _named(cache, body)
            if named is None:
                return {"done": True, "unknown": True}
            name, tenant = named
            entry = _Pin(name, _stored(tenant, name), None)
            engine = storage.region_engine
            has_pin = isinstance(engine, RegionEngine) and engine.has_pin(entry.stored_name)
            (nobody,) = least_on_every_rank(cache, [-int(has_pin)])
            if nobody == 0:
                return {"done": True, "unknown": True}
            if isinstance(engine, RegionEngine):
                entry.kept = engine.unpin(entry.stored_name)
            self._begun[number] = entry
        entry = self._begun[number]
        is_gone = entry.kept is None or entry.kept.done()
        (gone,) = least_on_every_rank(cache, [int(is_gone)])
        return {"done": bool(gone), "name": entry.name}


def list_pins(engine: RegionEngine, tenant: bytes) -> list[dict[str, Any]]:
    """Return the pins of a tenant, as this rank has them. Any thread; there may be many."""
    prefix = _stored(tenant, "")
    return [
        {
            "name": info.name.removeprefix(prefix),
            "num_tokens": msgspec.json.decode(info.data or b"0"),
            "bytes": info.physical_bytes,
            "pinned_until": info.until_s,
        }
        for info in engine.pins()
        if info.name.startswith(prefix)
    ]


def _named(cache: TieredRadixCache, body: dict[str, Any]) -> tuple[str, bytes] | None:
    """Return the name of a pin and its tenant; None where its ``rid`` is not known, or names no
    page."""
    if "name" in body:
        return body["name"], tenant_of_body(cache, body)
    selector = selector_of(cache, body)
    hashes = [] if selector is None else locate(cache, selector).hashes
    if selector is None or not hashes:
        return None
    return hashes[-1], cache.purged_tenants.tenant_of(selector.extra_key, selector.cache_salt)


def tenant_of_body(cache: TieredRadixCache, body: dict[str, Any]) -> bytes:
    """Return the tenant that a body's ``extra_key`` and ``cache_salt`` name."""
    key = key_of_request(body.get("extra_key"), None)
    return cache.purged_tenants.tenant_of(key, body.get("cache_salt"))


def _stored(tenant: bytes, name: str) -> str:
    """Return the name that the store knows a tenant's pin by: tenants do not see each other's."""
    return f"{tenant.hex()}/{name}"
