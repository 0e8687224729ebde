"""Write ``docs/openapi.json``: what the ``/tier`` calls take and answer, for programs.

    python scripts/write_openapi.py [--check]

Answers are the types that ``sglang_tiered.client`` reads them with; bodies are written here, and a
test holds them against what the server takes. ``--check`` writes nothing and exits with 1 where the
file says something else.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import sglang_tiered
from sglang_tiered.client import calls
from sglang_tiered.policy.server_costs import ServerCosts
from sglang_tiered.request_record import RequestRecord, Sources

PAGE = Path(__file__).resolve().parents[1] / "docs" / "openapi.json"
_REFS = "#/components/schemas/{name}"

Schema = dict[str, Any]

_MAX_TOKENS = 1 << 22
_TEXT: Schema = {"type": "string", "minLength": 1}
_NAME: Schema = {**_TEXT, "maxLength": 512, "description": "at most 512 bytes of UTF-8"}
_TENANT: Schema = {
    "extra_key": {**_TEXT, "description": "the tenant's key, as its requests carry it"},
    "cache_salt": {**_TEXT, "description": "the tenant's salt, as its requests carry it"},
}
_SOURCES: Schema = {
    "rid": {**_TEXT, "description": "id of a request that has ended; prompt and answer"},
    "conversation_id": _NAME,
    "text": {
        **_TEXT,
        "maxLength": 4 * _MAX_TOKENS,
        "description": "the prefix as text, tokenized here",
    },
    "input_ids": {
        "type": "array",
        "description": "the prefix as tokens",
        "items": {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1},
        "minItems": 1,
        "maxItems": _MAX_TOKENS,
    },
}
_TIER: Schema = {
    "tier": {
        "enum": ["nvme", "object"],
        "description": "a pin is on NVMe by default, a checkpoint in the bucket if there is one",
    }
}
_LIMIT: Schema = {
    "limit": {
        "type": "integer",
        "minimum": 1,
        "maximum": 1000,
        "default": 100,
        "description": "at most so many",
    }
}

_TIERS = ["nvme", "object"]
_MEANINGS: Schema = {
    "tier": {"enum": _TIERS, "description": "where the pages are"},
    "num_missing": {"description": "tokens of the prefix that are not durable there"},
    "device": {"description": "leading tokens in device memory"},
    "host": {"description": "leading tokens in host memory"},
    "nvme": {"description": "leading tokens on NVMe"},
    "object": {"description": "leading tokens in the bucket"},
    "peer": {"description": "leading tokens that other servers hold"},
    "name": {"description": "the pin's name"},
    "pinned_until": {"description": "Unix time in seconds; null until it is unpinned"},
    "num_in_memory": {"description": "leading tokens in device or host memory"},
    "num_loading": {"description": "tokens that are being loaded"},
    "in_memory": {
        "enum": ["gone", "hidden"],
        "description": "hidden: gone once no request is left",
    },
    "next": {"description": "what after= takes for the next page; null on the last"},
    "last_used": {"description": "Unix time in seconds; null where it is not known"},
    "bytes": {"description": "bytes that this pin keeps"},
}
_DESCRIBED = (
    *("Checkpoint", "Pin", "Prefetch", "Purge"),
    *("Residency", "Conversation", "ConversationPin", "ConversationPage"),
)
"""Answers whose fields these are."""


def _of(properties: Schema, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def _prefix(**more: Schema) -> Schema:
    """Exactly one of what names a prefix."""
    one = [{"required": [name]} for name in _SOURCES]
    return _of({**_SOURCES, **_TENANT, **more}, oneOf=one)


class LoggedRequest(RequestRecord, frozen=True, kw_only=True):
    """A line of ``--tier-log-requests``, and why it took as long as it did."""

    why: str


class LastMinute(Sources, frozen=True, kw_only=True):
    """Where the prompt tokens came from of the requests that ended in the last minute."""

    num_requests: int
    is_whole: bool


class NewestRequests(msgspec.Struct, frozen=True):
    """The newest requests that have ended, and the last minute."""

    requests: tuple[LoggedRequest, ...]
    minute: LastMinute


class Call(NamedTuple):
    """``body``: of a POST; ``query``: of a GET; None where it may not be asked so."""

    summary: str
    answer: Any
    body: Schema | None = None
    query: Schema | None = None
    statuses: tuple[int, ...] = (400, 500, 503)


_NAMED = (400, 404, 500, 503)
CALLS = {
    "checkpoint": Call(
        "Make a prefix durable; 503 counts what is not yet.",
        calls.Checkpoint,
        _prefix(**_TIER),
        statuses=_NAMED,
    ),
    "residency": Call(
        "Count the leading tokens of a prefix by tier. In a query, tokens stand between commas.",
        calls.Residency,
        _prefix(),
        {**_SOURCES, **_TENANT},
        _NAMED,
    ),
    "pin": Call(
        "Keep a prefix in a tier; 503 counts what is not durable yet.",
        calls.Pin,
        _prefix(
            name=_NAME,
            ttl={
                "type": "number",
                "exclusiveMinimum": 0,
                "maximum": 3650 * 86_400,
                "description": "seconds; without it until it is unpinned",
            },
            **_TIER,
        ),
        statuses=(400, 404, 409, 500, 503),
    ),
    "unpin": Call(
        "Let a pin go, by its name or its prefix.",
        calls.Unpinned,
        {"oneOf": [_of({"name": _NAME, **_TENANT}, required=["name"]), _prefix()]},
        statuses=_NAMED,
    ),
    "prefetch": Call(
        "Bring a prefix that is about to be used to host memory; 202 while that goes on.",
        calls.Prefetch,
        _prefix(
            wait_s={
                "type": "number",
                "minimum": 0,
                "maximum": 30,
                "default": 0,
                "description": "seconds to wait for it before the answer",
            }
        ),
        statuses=(202, *_NAMED),
    ),
    "forget": Call(
        "Remove what lies behind the first tokens of a prefix from every tier and server.",
        calls.Forgotten,
        _prefix(
            keep_tokens={
                "type": "integer",
                "minimum": 0,
                "maximum": _MAX_TOKENS,
                "default": 0,
                "description": "leading tokens that stay",
            }
        ),
        statuses=_NAMED,
    ),
    "purge": Call(
        "Remove all pages of a tenant, or of everybody, from every tier and server.",
        calls.Purge,
        {
            "oneOf": [
                _of({"all": {"const": True, "description": "everybody's"}}, required=["all"]),
                _of(_TENANT, minProperties=1),
            ]
        },
    ),
    "tenants": Call(
        "List the tenants with most on NVMe, for each scheduler.",
        list[list[calls.TenantUsage]],
        query=_LIMIT,
    ),
    "conversations": Call(
        "List a tenant's conversations, a page at a time.",
        calls.ConversationPage,
        query={
            **_TENANT,
            **_LIMIT,
            "after": {**_TEXT, "description": "what an answer gave as next"},
        },
    ),
    "costs": Call(
        "What computing and loading cost here, and how busy the server is.",
        ServerCosts,
        query={},
        statuses=(404, 503),
    ),
    "requests": Call(
        "List the newest requests that have ended, and the sources of the last minute's tokens.",
        NewestRequests,
        query={"limit": {**_LIMIT["limit"], "default": 20}},
        statuses=(400, 404, 503),
    ),
}
_SAID = {
    400: "refused for what was sent",
    401: "the server has a key, and this is none",
    403: "another site's page had a browser send this to a server without keys",
    404: "not known",
    409: "beyond a bound",
    500: "a scheduler failed",
    503: "ask again",
}
_REFUSAL: Schema = {
    "type": "object",
    "properties": {"error": _TEXT},
    "required": ["error"],
    "description": "One sentence.",
}


def document() -> Schema:
    """The whole description."""
    answers, schemas = msgspec.json.schema_components(
        [call.answer for call in CALLS.values()], ref_template=_REFS
    )
    for schema in schemas.values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    for name in _DESCRIBED:
        for field, schema in schemas[name]["properties"].items():
            schema.update(_MEANINGS.get(field, {}))
    paths = {
        f"/tier/{name}": _operations(name, call, answer)
        for (name, call), answer in zip(CALLS.items(), answers, strict=True)
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "The tiers of a server",
            "version": sglang_tiered.__version__,
            "description": "docs/operations.md tells more of each call. The key is that of "
            "SGLang's /flush_cache: --admin-api-key, else --api-key.",
        },
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {**schemas, "Refusal": _REFUSAL},
        },
    }


def _operations(name: str, call: Call, answer: Schema) -> Schema:
    operations: Schema = {}
    if call.query is not None:
        operations["get"] = {
            "parameters": [
                {"name": each, "in": "query", "schema": schema, "style": "form", "explode": False}
                for each, schema in call.query.items()
            ]
        }
    if call.body is not None:
        content = {"application/json": {"schema": call.body}}
        operations["post"] = {"requestBody": {"required": True, "content": content}}
    for method, operation in operations.items():
        operation["operationId"] = f"{method}_{name}"
        operation["summary"] = call.summary
        operation["responses"] = _responses(call, answer)
    return operations


def _responses(call: Call, answer: Schema) -> Schema:
    refusal = {"$ref": _REFS.format(name="Refusal")}
    found = {}
    for status in (200, 401, 403, *call.statuses):
        schema = answer if status < 300 else refusal
        if status == 503 and call.body is not None:
            schema = {"anyOf": [refusal, answer]}
        found[str(status)] = {
            "description": _SAID.get(status, "under way" if status == 202 else "done"),
            "content": {"application/json": {"schema": schema}},
        }
    return found


def text() -> str:
    """The file as it should be."""
    return json.dumps(document(), indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it differs")
    if not parser.parse_args().check:
        PAGE.write_text(text(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text():
        print("docs/openapi.json is old; run python scripts/write_openapi.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
