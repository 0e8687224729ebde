"""What the endpoints take for a selector, and what rids they remember."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from sglang_tiered.integration import conversations
from sglang_tiered.integration.conversations import RecentRequests, Selector
from sglang_tiered.integration.tier_api import SelectorError, parse_selector


@pytest.mark.parametrize(
    "body",
    [
        {"rid": "r"},
        {"text": "Hello", "extra_key": "acme"},
        {"input_ids": [1, 2, 3], "cache_salt": "s", "tier": "nvme"},
        {"rid": "r", "tier": "object"},
    ],
)
def test_a_selector_names_one_prefix(body: dict[str, Any]) -> None:
    assert parse_selector(body, with_tier=True) == body


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ([], "must be a JSON object"),
        ({}, "exactly one of"),
        ({"extra_key": "a"}, "exactly one of"),
        ({"rid": "r", "text": "t"}, "exactly one of"),
        ({"rid": ""}, "rid must be a text"),
        ({"rid": 7}, "rid must be a text"),
        ({"rid": "r", "extra_key": "a"}, "leave them out"),
        ({"text": "t", "extra_key": None}, "extra_key must be a text"),
        ({"input_ids": []}, "list of token numbers"),
        ({"input_ids": [1.5]}, "list of token numbers"),
        ({"input_ids": [-1]}, "list of token numbers"),
        ({"input_ids": [True]}, "list of token numbers"),
        ({"input_ids": "1,2"}, "list of token numbers"),
        ({"text": "t", "tier": "tape"}, "choose one of nvme, object"),
        ({"text": "t", "prompt": "u"}, "'prompt' is unknown"),
    ],
)
def test_anything_else_is_one_sentence(body: Any, sentence: str) -> None:
    with pytest.raises(SelectorError, match=sentence):
        parse_selector(body, with_tier=True)


def test_residency_asks_for_no_tier() -> None:
    with pytest.raises(SelectorError, match="'tier' is unknown"):
        parse_selector({"text": "t", "tier": "nvme"}, with_tier=False)


def test_recent_requests_are_bounded_by_number_and_by_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversations, "_MAX_REQUESTS", 3)
    monkeypatch.setattr(conversations, "_MAX_TOKENS", 100)
    recent = RecentRequests()

    def note(rid: str, num_tokens: int) -> None:
        recent.note(rid, Selector(array("q", range(num_tokens)), "tenant", None))

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
