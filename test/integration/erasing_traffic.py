"""Purges, forgets, hints, pins and hidden memory among the traffic of a scheduling world, by the
calls that servers get, and the books that say which pages a request may find.

KV bears the number of erasures that its request had seen when it began. What was purged is known by
it: KV from before is nobody's hit again. Forgotten pages stay in the tree and are shown once they
are computed again, so of those the books say when a request that began later has computed them.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_tiered.integration.admin.calls import advance
from sglang_tiered.integration.admin.control import Control, hide_memory
from sglang_tiered.integration.admin.conversations import WORK_S
from sglang_tiered.integration.admin.prefixes import keepers, prefixes_of_body, stored_name
from sglang_tiered.integration.admin.service import CONTROL_PREFIX

if TYPE_CHECKING:
    import random


TENANTS = (None, "a", "a", None)
"""The ``extra_key`` of each family of prompts."""
PINS = "xyz"
SHARES = {"purge": 0.003, "forget": 0.006, "hide": 0.001, "hint": 0.01, "pin": 0.005}
"""How often each happens in a step."""


def _named(family: int) -> dict[str, str]:
    tenant = TENANTS[family]
    return {} if tenant is None else {"extra_key": tenant}


class ErasingTraffic:
    """See the module docstring."""

    def __init__(self, world: Any, rnd: random.Random) -> None:
        self._world, self._rnd = world, rnd
        self.control = Control()
        self.control.attach(world.scheduler)
        self.num_erasures = 0
        self.counts: Counter[str] = Counter()
        self.families: list[list[int]] = []
        self._number = 0  # of the last call
        self.open_calls: dict[str, str] = {}  # by number: what has not ended
        self._since: dict[str, int] = {}  # by rid: erasures that it had seen when it began
        self._purged: dict[bytes, int] = {}  # by tenant: the last one
        self._forgotten: dict[str, list[int]] = defaultdict(list)  # by page
        self._computed: dict[str, int] = {}  # by page: the erasures that its request had seen

    # ---- What a request may find ----

    def _pages(self, tokens: Any, extra_key: str | None) -> list[str]:
        pages: list[str] = self._world.cache.page_hashes(RadixKey(tokens, extra_key=extra_key))
        return pages

    def runs(self, req: Any, begin: int, end: int, stamps: list[int]) -> int:
        """A batch computes a part of a request behind a prefix whose KV has these stamps. Returns
        the stamp of what it computes."""
        number = self._since.setdefault(req.rid, self.num_erasures)
        page_size = self._world.cache.page_size
        tenant = self._world.cache.hidden_tenants.tenant_of(req.extra_key, None)
        purged = self._purged.get(tenant, 0)
        if purged <= number:
            stale = [at for at, stamp in enumerate(stamps) if stamp < purged]
            assert not stale, f"{req.rid} finds KV from before the purge {purged}: {stale[:4]}"
        pages = self._pages(req.full_untruncated_fill_ids[:end], req.extra_key)
        for at, page in enumerate(pages[: begin // page_size]):
            told = self._forgotten.get(page, ())
            last = told[bisect_right(told, number) - 1] if told and told[0] <= number else 0
            assert self._computed.get(page, 0) >= last, (
                f"{req.rid} finds its page {at}, forgotten by {last} and not computed since"
            )
        for page in pages[begin // page_size :]:
            self._computed[page] = max(self._computed.get(page, 0), number)
        self.counts["found after a purge"] += bool(stamps and purged and min(stamps) >= purged)
        return number

    def _erased(self) -> int:
        """Another erasure: what waits and has no KV begins behind it."""
        for req in self._world.scheduler.waiting_queue:
            if not req.kv.holds_kv:
                self._since.pop(req.rid, None)
        self.num_erasures += 1
        return self.num_erasures

    # ---- What happens ----

    def _call(self, what: str, **body: Any) -> dict[str, Any]:
        self._number += 1
        number = str(self._number)
        answer = self._answer(number, what, **body)
        if not answer.get("done") and "error" not in answer:
            self.open_calls[number] = what
        return answer

    def _answer(self, number: str, what: str, **body: Any) -> dict[str, Any]:
        return self.control._answer(f"{CONTROL_PREFIX}{what}", {"id": number, **body})

    def something_happens(self) -> None:
        for what, share in SHARES.items():
            if self._rnd.random() < share:
                self.counts[what] += 1
                getattr(self, f"_{what}")()
        if self._rnd.random() < 0.05:
            self._ask_again()

    def _ask_again(self) -> None:
        for number, what in list(self.open_calls.items()):
            answer = self._answer(number, what)
            if answer.get("done") or "error" in answer:
                del self.open_calls[number]
                assert answer.get("durable", True), (what, answer)

    def _family(self) -> tuple[list[int], dict[str, str]]:
        """A prompt that has no adapter, and the fields that name its tenant."""
        number = self._rnd.choice((0, 1))
        return self.families[number], _named(number)

    def _purge(self) -> None:
        cache = self._world.cache
        tenant = self._rnd.choice((None, None, "a"))
        body: dict[str, Any] = {"all": True} if tenant is None else {"extra_key": tenant}
        erased = self._erased()
        for key in TENANTS if tenant is None else [tenant]:
            self._purged[cache.hidden_tenants.tenant_of(key, None)] = erased
        self._call("purge", **body)
        for number in (0, 1):
            if tenant in (None, TENANTS[number]):
                self._is_nowhere(number, 0)

    def _forget(self) -> None:
        """Forget a family's end, or that of a request, which may run, load or wait."""
        page_size = self._world.cache.page_size
        if self._rnd.random() < 0.5:
            tokens, body = self._family()
            body = {**body, "input_ids": tokens[: self._rnd.randrange(page_size, len(tokens) + 1)]}
        else:
            body = {"rid": self._rnd.choice(list(self._since) or ["nobody"])}
        keep_tokens = self._rnd.choice((0, self._rnd.randrange(600)))
        num_kept = -(-keep_tokens // page_size)
        prefixes = advance(self._world.cache, prefixes_of_body(self._world.cache, body))[0]
        erased = self._erased()
        for selector in (each.selector for each in prefixes):
            for page in self._pages(selector.tokens, selector.extra_key)[num_kept:]:
                self._forgotten[page].append(erased)
        answer = self._call("forget", **body, keep_tokens=keep_tokens)
        assert "error" not in answer, answer
        if len(body.get("input_ids", ())) // page_size > num_kept:
            self._is_nowhere(int(body["input_ids"][0] == self.families[1][0]), num_kept * page_size)

    def _hide(self) -> None:
        hide_memory(self._world.scheduler)
        for number in (0, 1):
            held = self.held(number)
            assert held["device"] == held["host"] == 0, held

    def _hint(self) -> None:
        tokens, body = self._family()
        self._call("prefetch", **body, input_ids=tokens)

    def _pin(self) -> None:
        tokens, body = self._family()
        body = {**body, "input_ids": tokens[: self._rnd.randrange(32, len(tokens))]}
        self._call("pin", **body, now=time.time(), name=self._rnd.choice(PINS))

    def held(self, number: int) -> dict[str, Any]:
        """How many leading tokens of a family each tier holds."""
        return self._call("residency", input_ids=self.families[number], **_named(number))

    def _is_nowhere(self, number: int, most: int) -> None:
        held = self.held(number)
        tiers = {tier: held[tier] for tier in ("device", "host", "nvme")}
        assert max(tiers.values()) <= most, (tiers, most)

    def flush(self, *, empty_cache: bool = True) -> bool:
        """SGLang's own, and what our hook behind it does on a server."""
        flushed = bool(Scheduler.flush_cache(self._world.scheduler, empty_cache))
        if flushed:
            self.control.memory_was_flushed()
            assert not self._world.cache.hidden_tenants, "every idle step would flush"
        return flushed

    # ---- The end ----

    def _end_calls(self) -> None:
        """Until every call that began is over. A pin waits its whole time where its pages were
        erased before they were stored."""

        def ask() -> None:
            self._world.rest()
            self._ask_again()

        self._world.until(lambda: not self.open_calls, ask, WORK_S)

    def check_served(self) -> None:
        """What is computed now is stored and found in the store, though the tree holds nodes of
        before still. What a host tier has no room for beside others is not stored, so it is emptied
        and gets half of what it can hold."""
        world, cache = self._world, self._world.cache
        self._end_calls()  # what is being erased is not stored meanwhile
        most = cache.cache_controller.mem_pool_host.logical_size // 2
        for number in (0, 1):
            world.empty_memory()
            tokens = self.families[number][:most]
            whole = len(tokens) // cache.page_size * cache.page_size
            world.runs_alone(f"computes{number}", tokens, number)
            world.until(lambda n=number, all_of=whole: self.held(n)["nvme"] >= all_of, world.rest)

    def check_clean(self) -> None:
        """No call is open, no hint is left, and after a last purge no pin and no page."""
        cache = self._world.cache
        self._call("purge", all=True)
        self._end_calls()
        assert not len(cache.tiering.hints._queue) and not cache.tiering.hints._queue.num_tokens
        for keeper in keepers(cache.storage).values():
            names = {stored_name(tenant, name) for tenant in self._purged for name in PINS}
            assert not any(map(keeper.has_pin, names))
        assert cache.process_stats()["nvme"].num_pages == 0
