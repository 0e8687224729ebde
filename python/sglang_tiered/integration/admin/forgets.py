"""``Forgets``: conversations that are forgotten, in a scheduler process, for ``service``.

Every rank gets the same messages in the same order. Whether what is erased is so durably, and known
to every other server, is asked afterwards: the scheduler waits for nothing.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_parallel

from sglang_tiered.integration.admin.conversations import (
    PendingRequests,
    erasure_of,
    is_detached,
    progress,
    refused,
    selectors_of,
)
from sglang_tiered.integration.ranks import least_on_every_rank
from sglang_tiered.policy.forget_allowance import MAX_KEYS, ForgetAllowance

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.identity.recent_requests import PrefixSelector

__all__ = ["Forgets"]

DETACHED = (
    "the NVMe tier is detached: what it holds was not forgotten, only what memory held was; attach "
    "it and ask again"
)


@dataclass(slots=True)
class _Forget:
    hashes: list[str]  # as the tiers know the pages; none once they were told
    num_pages: int
    under_way: list[Future[bool]]
    selectors: list[PrefixSelector] = field(default_factory=list)
    num_kept_tokens: int = 0


class Forgets:
    """The conversations that one scheduler process forgets. Scheduler thread only."""

    def __init__(self) -> None:
        self._begun: PendingRequests[_Forget] = PendingRequests()
        self._allowance = ForgetAllowance()

    def answer(self, cache: TieredRadixCache, number: str, body: dict[str, Any]) -> dict[str, Any]:
        """Begin to forget a conversation behind its first ``keep_tokens``, or the pages with these
        ``hashes``, or report how far that is."""
        try:
            return self._answer(cache, number, body)
        except _TooMany as refusal:
            return refused(str(refusal), 503)

    def _answer(self, cache: TieredRadixCache, number: str, body: dict[str, Any]) -> dict[str, Any]:
        if number not in self._begun:
            if "keep_tokens" in body:
                selectors = selectors_of(cache, body)
                if not selectors:
                    return {"done": True, "unknown": True}
                self._begun[number] = _forget(
                    cache, number, selectors, int(body["keep_tokens"]), self._spend
                )
            elif "hashes" in body:
                self._spend(cache, len(body["hashes"]))
                self._begun[number] = _forget_pages(cache, number, body["hashes"])
            else:  # a later question, and it was dropped
                return refused("too many conversations are forgotten at once; ask again", 503)
        entry = self._begun[number]
        if is_detached(cache):
            del self._begun[number]  # the next request begins anew
            return refused(DETACHED, 503)
        done, durable = progress(cache, entry.under_way)
        if durable:  # until then the caller may name it again
            recents, original = cache.recent_requests, cache.hidden_tenants.original
            recents.forget(entry.selectors, entry.num_kept_tokens, int(cache.page_size), original)
            entry.selectors = []
        num_tokens = entry.num_pages * int(cache.page_size)
        answer: dict[str, Any] = {"done": done, "durable": durable, "num_tokens": num_tokens}
        if entry.hashes and "keep_tokens" in body and "input_ids" not in body:
            # For the replicas that do not know the rid; once, as they may be megabytes.
            answer |= {"hashes": entry.hashes} if get_parallel().dp_size > 1 else {}
        entry.hashes = []
        return answer

    def _spend(self, cache: TieredRadixCache, num_pages: int) -> None:
        """Note that so many pages are forgotten, on all ranks or on none. Raises ``_TooMany``."""
        if not num_pages:
            return
        asked = f"these are {num_pages:,} pages, and a server forgets {MAX_KEYS:,} in an hour"
        now = time.monotonic()
        wait_s = self._allowance.wait_s(num_pages, now)
        if math.isinf(wait_s):
            raise _TooMany(f"{asked}: use a purge of the tenant")
        (least,) = least_on_every_rank(cache, [-math.ceil(wait_s)])
        if least:
            raise _TooMany(f"{asked}: use a purge of the tenant, or ask again after {-least} s")
        self._allowance.take(num_pages, now)


class _TooMany(Exception):  # noqa: N818
    """Raised with the sentence that refuses to forget so many pages now."""


def _forget(
    cache: TieredRadixCache,
    number: str,
    selectors: list[PrefixSelector],
    keep_tokens: int,
    spend: Callable[[TieredRadixCache, int], None],
) -> _Forget:
    num_kept = -(-keep_tokens // int(cache.page_size))
    hashes: dict[str, None] = {}
    for selector in (longest := _longest(selectors)):
        hashes.update(dict.fromkeys(_pages_behind(cache, selector, num_kept)))
    spend(cache, len(hashes))
    entry = _forget_pages(cache, number, list(hashes))
    entry.selectors, entry.num_kept_tokens = longest, num_kept * int(cache.page_size)
    return entry


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
    key_of, salt = cache.hidden_tenants.key_of, selector.cache_salt
    # By the key of now: what a purge has hidden matches nothing anyway.
    key = RadixKey(selector.tokens, extra_key=key_of(selector.extra_key, salt), cache_salt=salt)
    pages = cache.page_hashes(key)
    if num_kept and len(pages) > num_kept:
        # The tree cuts its nodes where a match ends: what is kept can be stored by itself.
        cache.match_visible(key[: num_kept * int(cache.page_size)])
    return pages[num_kept:]


def _forget_pages(cache: TieredRadixCache, number: str, hashes: list[str]) -> _Forget:
    """Hide pages in memory, and forget them in the tiers."""
    what = erasure_of(number, hashes=hashes)
    return _Forget(hashes, len(hashes), cache.erase(what) if hashes else [])
