"""Requests whose conversations can be asked for are forgotten in time."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from sglang_tiered.integration.identity import recent_requests
from sglang_tiered.integration.identity.recent_requests import RecentRequests, Selector

if TYPE_CHECKING:
    import pytest


def test_recent_requests_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recent_requests, "_MAX_REQUESTS", 3)
    monkeypatch.setattr(recent_requests, "_MAX_TOKENS", 100)
    recent = RecentRequests()

    def note(rid: str, num_tokens: int) -> None:
        recent.note_request(rid, Selector(array("q", range(num_tokens)), "tenant", None))

    for rid in "abcd":
        note(rid, 10)
    assert recent.get("a") is None
    assert recent.get("d") == Selector(array("q", range(10)), "tenant", None)
    note("b", 85)  # it went on; the oldest make room
    assert recent.get("c") is None
    selector = recent.get("b")
    assert selector is not None and len(selector.tokens) == 85
    note("e", 1000)
    assert [recent.get(rid) for rid in "abcde"] == [None] * 5
