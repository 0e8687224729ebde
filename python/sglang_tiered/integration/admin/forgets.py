"""``Forgets``: conversations that are forgotten, in a scheduler process, for ``service``.

Whether what is erased is so durably, and known to every other server, is asked afterwards.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_parallel

from sglang_tiered.api import CallError
from sglang_tiered.integration.admin.calls import UNKNOWN, is_detached, outcome
from sglang_tiered.integration.admin.conversations import erasure_of, selectors_of
from sglang_tiered.policy.forget_allowance import MAX_KEYS, ForgetAllowance

if TYPE_CHECKING:
    from sglang_tiered.integration.admin.calls import Steps
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.identity.recent_requests import PrefixSelector

__all__ = ["Forgets"]

DETACHED = (
    "the NVMe tier is detached: what it holds was not forgotten, only what memory held was; attach "
    "it and ask again"
)
STAGED = (
    "the pages are hidden, and the first stage has forgotten them for good, but with --pp-size "
    "above 1 nobody can tell that of the others"
)


class Forgets:
    """The conversations that one scheduler process forgets. Scheduler thread only."""

    def __init__(self) -> None:
        self._allowance = ForgetAllowance()

    def begin(self, cache: TieredRadixCache, number: str, body: dict[str, Any]) -> Steps:
        """Forget a conversation behind its first ``keep_tokens``, or the pages with these
        ``hashes``."""
        page_size = int(cache.page_size)
        num_kept = -(-int(body.get("keep_tokens", 0)) // page_size)
        selectors: list[PrefixSelector] = []
        if "hashes" not in body:
            selectors = _longest((yield from selectors_of(cache, body)))
            if not selectors:
                return UNKNOWN
            behind = (_pages_behind(cache, each, num_kept) for each in selectors)
            body = {
                **body,
                "hashes": list(dict.fromkeys(page for pages in behind for page in pages)),
            }
        hashes: list[str] = body["hashes"]
        yield from self._spend(len(hashes))
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
            report |= {"done": done, "durable": durable}
            if done:
                return report
            yield dict(report)

    def _spend(self, num_pages: int) -> Steps:
        """Note that so many pages are forgotten, on all ranks or on none. Raises ``CallError``."""
        if not num_pages:
            return
        asked = f"these are {num_pages:,} pages, and a server forgets {MAX_KEYS:,} in an hour"
        now = time.monotonic()
        wait_s = self._allowance.wait_s(num_pages, now)
        if math.isinf(wait_s):
            raise CallError(f"{asked}: use a purge of the tenant", 503)
        (least,) = yield [-math.ceil(wait_s)]
        if least:
            raise CallError(
                f"{asked}: use a purge of the tenant, or ask again after {-least} s", 503
            )
        self._allowance.take(num_pages, now)


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
