"""What a body or headers name reaches the request, or is refused; and an id never fails one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from starlette.datastructures import Headers

from sglang_tiered.integration.identity.request_names import (
    MAX_ID_BYTES,
    BodyRefused,
    after_tokenizing,
    carry,
    take_overrides,
)


def http(headers: dict[str, str] | None = None, **body: Any) -> Any:
    """An HTTP request whose body its endpoint has read."""

    async def json() -> dict[str, Any]:
        return body

    return SimpleNamespace(headers=Headers(headers or {}), json=json)


@pytest.mark.parametrize(("allowed", "expected"), [("1", (7, 9)), ("0", (3, None))])
def test_headers_count_only_where_allowed(
    monkeypatch: pytest.MonkeyPatch, allowed: str, expected: tuple[int, int | None]
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", allowed)
    made = GenerateReqInput(text="Hi", priority=3)
    take_overrides(made, http({"x-override-priority": "7", "x-override-bootstrap-room": "9"}))
    assert (made.priority, made.bootstrap_room) == expected
    if allowed == "1":
        with pytest.raises(BodyRefused, match="x-override-priority"):
            take_overrides(made, http({"x-override-priority": "high"}))


@pytest.mark.parametrize(
    ("made", "body", "said"),
    [
        (EmbeddingReqInput(text="Hi"), {"extra_key": "s"}, "extra_key cannot separate"),
        (GenerateReqInput(text="Hi"), {"cache_salt": 5}, "cache_salt is 5, not a text"),
        (GenerateReqInput(text="Hi"), {"instances": [{"extra_key": "s"}]}, "in parameters"),
    ],
)
def test_tenant_that_cannot_be_kept_apart_is_refused(
    made: Any, body: dict[str, Any], said: str
) -> None:
    with pytest.raises(BodyRefused, match=said) as caught:
        carry(made, http(**body))
    assert caught.value.status_code == 400 and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("bad", ["", "x" * (MAX_ID_BYTES + 1), "\ud800", 7])
def test_unusable_id_never_fails_a_request(bad: Any) -> None:
    tokenized: Any = SimpleNamespace(kv_hints=None)
    after_tokenizing(tokenized, SimpleNamespace(conversation_id=bad))
    assert tokenized.kv_hints is None
