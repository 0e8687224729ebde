"""What the calls take: anything else is refused with one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_tiered.integration.admin import bodies
from sglang_tiered.integration.admin.bodies import (
    CallError,
    cursor_of,
    parse_forget,
    parse_limit,
    parse_listing,
    parse_pin,
    parse_prefetch,
    parse_purge,
    parse_selector,
    parse_unpin,
)


@pytest.mark.parametrize(
    "body",
    [
        {"rid": "r"},
        {"text": "Hello", "extra_key": "acme"},
        {"input_ids": [1, 2, 3], "cache_salt": "s", "tier": "nvme"},
        {"rid": "r", "tier": "object"},
        {"conversation_id": "c", "extra_key": "acme"},
        {"rid": "r", "extra_key": "acme", "cache_salt": "s"},
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
        ({"rid": "r", "conversation_id": "c"}, "exactly one of"),
        ({"conversation_id": 7}, "conversation_id must be a text"),
        ({"conversation_id": "c" * 513}, "conversation_id has 513 bytes, more than 512"),
        ({"rid": ""}, "rid must be a text"),
        ({"rid": 7}, "rid must be a text"),
        ({"text": "t", "extra_key": None}, "extra_key must be a text"),
        ({"input_ids": []}, "list of token numbers"),
        ({"input_ids": [1.5]}, "list of token numbers"),
        ({"input_ids": [-1]}, "list of token numbers"),
        ({"input_ids": [True]}, "list of token numbers"),
        ({"input_ids": "1,2"}, "list of token numbers"),
        ({"text": "t", "tier": "tape"}, "choose one of nvme, object"),
        ({"text": "t", "prompt": "u"}, "'prompt' is unknown"),
        ({"text": "a\ud800"}, r"text has '\\ud800' at character 1, half of a surrogate pair"),
        ({"rid": "\udfff"}, "pass the whole character"),
        ({"text": "t", "\ud800": 1}, r"'\\ud800' is unknown"),
        ({"text": "t", "x" * 10_000: 1}, "'x{40}' is unknown"),
        ({"text": "t", "tier": "\ud800"}, "tier has"),
    ],
)
def test_anything_else_is_one_sentence(body: Any, sentence: str) -> None:
    with pytest.raises(CallError, match=sentence):
        parse_selector(body, with_tier=True)


def test_residency_asks_for_no_tier() -> None:
    with pytest.raises(CallError, match="'tier' is unknown"):
        parse_selector({"text": "t", "tier": "nvme"}, with_tier=False)


def test_every_form_of_prompt_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_MAX_TOKENS", 8)
    monkeypatch.setattr(bodies, "_MAX_CHARACTERS", 32)
    with pytest.raises(CallError, match="input_ids has 9 tokens, more than 8; pass the begin"):
        parse_selector({"input_ids": [1] * 9}, with_tier=True)
    with pytest.raises(CallError, match="text has 33 characters, more than 32"):
        parse_selector({"text": "a" * 33}, with_tier=True)


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_half_a_character_names_no_tenant(name: str) -> None:
    with pytest.raises(CallError, match=f"{name} has .* half of a surrogate pair"):
        parse_purge({name: "\ud800"})


@pytest.mark.parametrize(
    "body",
    [{"rid": "r", "tier": "object"}, {"text": "t", "extra_key": "a", "name": "n", "ttl": 0.5}],
)
def test_a_pin_may_have_name_and_end(body: dict[str, Any]) -> None:
    assert parse_pin(body) == body


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (["name"], "must be a JSON object"),
        ({"name": "n"}, "exactly one of"),
        ({"rid": "r", "tier": "tape"}, "tier 'tape' is unknown"),
        ({"rid": "r", "name": 3}, "name must be a text"),
        ({"rid": "r", "name": "n" * 513}, "name has 513 bytes, more than 512"),
        ({"rid": "r", "ttl": 0}, "ttl 0 must be seconds, more than 0"),
        ({"rid": "r", "ttl": float("nan")}, "ttl nan must be"),
        ({"rid": "r", "ttl": True}, "ttl True must be"),
        ({"rid": "r", "ttl": "1h"}, "ttl '1h' must be"),
        ({"rid": "r", "ttl": 10**5000}, "ttl of too many digits must be"),
        ({"rid": "r", "bogus": 1}, "'bogus' is unknown here; pass .* name, .* ttl"),
    ],
)
def test_a_wrong_pin_is_one_sentence(body: Any, sentence: str) -> None:
    with pytest.raises(CallError, match=sentence):
        parse_pin(body)


@pytest.mark.parametrize("body", [{"name": "n", "cache_salt": "s"}, {"input_ids": [1]}])
def test_what_is_unpinned_has_a_name(body: dict[str, Any]) -> None:
    assert parse_unpin(body) == body


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (7, "must be a JSON object"),
        ({}, "exactly one of"),
        ({"name": ""}, "name must be a text"),
        ({"name": "n", "rid": "r"}, "'rid' is unknown here"),
        ({"name": "n", "extra_key": 1}, "extra_key must be a text"),
    ],
)
def test_a_wrong_unpin_is_one_sentence(body: Any, sentence: str) -> None:
    with pytest.raises(CallError, match=sentence):
        parse_unpin(body)


@pytest.mark.parametrize(
    ("body", "limit"),
    [({}, 100), ({"limit": "7"}, 7), ({"limit": 1}, 1), ({"limit": "1000"}, 1000)],
)
def test_a_list_has_a_bound(body: dict[str, Any], limit: int) -> None:
    assert parse_limit(body) == {"limit": limit}


@pytest.mark.parametrize("body", [[], {"limt": 1}])
def test_a_list_takes_a_limit_alone(body: Any) -> None:
    with pytest.raises(CallError, match="pass limit, a number"):
        parse_limit(body)


@pytest.mark.parametrize(
    "limit", ["-1", "", True, "\u0663", 0, 1001, "1001", "9" * 5000, [10**5000], None]
)
def test_a_limit_beyond_its_bounds_is_refused(limit: Any) -> None:
    for parse in (parse_limit, parse_listing):
        with pytest.raises(CallError, match=r"limit .{1,50} must be a number from 1 to 1000$"):
            parse({"limit": limit})


def test_a_cursor_comes_back_as_it_went() -> None:
    assert parse_listing({}) == {"limit": 100, "after": {}}
    assert cursor_of({"0": None, "1": None}) is None
    cursors: dict[str, str | None] = {"0": "r17", "1": None, "2": "pi\N{SNOWMAN}\n"}
    after = cursor_of(cursors)
    body = parse_listing({"after": after, "limit": "5", "cache_salt": "s"})
    assert body == {"after": cursors, "limit": 5, "cache_salt": "s"}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ([], "must be a JSON object"),
        ({"limit": "x"}, "a number"),
        ({"rid": "r"}, "'rid' is unknown here; pass extra_key, cache_salt, limit, after"),
        ({"after": 7}, "after must be a text"),
        ({"after": "%"}, "not what an answer gave"),
        ({"after": "\N{SNOWMAN}"}, "not what an answer gave"),
        ({"after": "e30x"}, "not what an answer gave"),
        ({"after": cursor_of({"0": "r-1"})}, "not what an answer gave"),
        ({"after": cursor_of({"0": "q"})}, "not what an answer gave"),
        ({"after": cursor_of({"0": "x" * 1000})}, "after '.{40}' is not"),
    ],
)
def test_a_wrong_listing_is_one_sentence(body: Any, sentence: str) -> None:
    with pytest.raises(CallError, match=sentence):
        parse_listing(body)


def test_a_hint_says_how_long_to_wait() -> None:
    assert parse_prefetch({"rid": "r"}) == ({"rid": "r"}, 0.0)
    assert parse_prefetch({"input_ids": [1], "wait_s": 30}) == ({"input_ids": [1]}, 30.0)
    with pytest.raises(CallError, match="JSON object"):
        parse_prefetch([])
    with pytest.raises(CallError, match="exactly one of"):
        parse_prefetch({"wait_s": 1})


@pytest.mark.parametrize("keep", [-1, [10**5000], True, None])
def test_a_wrong_keep_is_one_sentence(keep: Any) -> None:
    with pytest.raises(CallError, match=r"keep_tokens .{1,40} must be a number from 0"):
        parse_forget({"rid": "r", "keep_tokens": keep})


def test_unknown_fields_are_told_all_known_ones() -> None:
    with pytest.raises(CallError, match="keep_tokens, rid"):
        parse_forget({"rid": "r", "keep_tokens": 1, "bogus": 1})
    with pytest.raises(CallError, match="text, wait_s"):
        parse_prefetch({"rid": "r", "bogus": 1})


@pytest.mark.parametrize("wait_s", [-1, 30.1, "1", None, True, float("nan"), float("inf")])
def test_a_wait_beyond_its_bounds_is_refused(wait_s: Any) -> None:
    with pytest.raises(CallError, match="wait_s .* at most 30"):
        parse_prefetch({"rid": "r", "wait_s": wait_s})
