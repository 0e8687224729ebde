"""Requests whose conversations can be asked for are forgotten in time."""

from __future__ import annotations

import tracemalloc
from array import array

import pytest

from sglang_tiered.integration.identity import recent_requests
from sglang_tiered.integration.identity.recent_requests import PrefixSelector, RecentRequests
from sglang_tiered.integration.identity.tenants import HiddenTenants
from sglang_tiered.storage.base import NO_TENANT


def test_recent_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_requests, "_MAX_REQUESTS", 3)
    monkeypatch.setattr(recent_requests, "_MAX_BYTES", 100 * 8 + 300)
    recent = RecentRequests()

    def note(rid: str, num_tokens: int) -> None:
        recent.note_request(
            rid, PrefixSelector(array("q", range(num_tokens)), "key", None), NO_TENANT
        )

    for rid in "abcd":
        note(rid, 10)
    assert recent.find("a") is None
    last = recent.find("d")
    assert last is not None and last.selector == PrefixSelector(array("q", range(10)), "key", None)
    note("b", 85)  # it went on; the oldest make room
    assert recent.find("c") is None
    last = recent.find("b")
    assert last is not None and len(last.selector.tokens) == 85
    note("e", 1000)
    assert [recent.find(rid) for rid in "abcde"] == [None] * 5


@pytest.mark.parametrize("long", ["rid", "extra_key", "cache_salt", "conversation"])
def test_long_names_take_no_memory(long: str) -> None:
    """A client chooses them, and 1,024 requests are remembered."""
    recent = RecentRequests()
    tracemalloc.start()
    try:
        for number in range(64):
            names = dict.fromkeys(("rid", "extra_key", "cache_salt", "conversation"), f"{number}")
            names[long] = f"{number}".zfill(3 << 20)
            tokens = array("q", range(64))
            selector = PrefixSelector(tokens, names["extra_key"], names["cache_salt"])
            recent.note_request(names["rid"], selector, NO_TENANT, names["conversation"])
        del names, selector
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 1 << 20


def test_forgotten_beginnings_go_too() -> None:
    """Their tokens are those of the conversation, though they have no page of it."""
    recent = RecentRequests()
    for end in (3, 4, 5, 8, 20):
        recent.note_request(str(end), PrefixSelector(array("q", range(end)), None, None), NO_TENANT)
    recent.note_request("other", PrefixSelector(array("q", [0, 1, 2, 3, 9]), None, None), NO_TENANT)
    recent.note_request("key", PrefixSelector(array("q", range(20)), "key", None), NO_TENANT)
    purged = HiddenTenants()
    purged.quarantine(None)  # from now on, they would go by another key
    marked = PrefixSelector(array("q", range(12)), purged.key_of(None, None), None)
    recent.forget([PrefixSelector(array("q", range(6)), None, None)], 4, 4, purged.original)
    assert recent.find("5") and recent.find("20"), "by a prefix without a page behind them"
    others = [PrefixSelector(array("q", [number] * 12), None, None) for number in range(9)]
    recent.forget([*others, marked], 4, 4, purged.original)
    assert [each.rid for each in recent.of_tenant(NO_TENANT)] == ["key", "other", "4", "3"]
    recent.drop_tenant(None)
    assert not list(recent.of_tenant(NO_TENANT))
