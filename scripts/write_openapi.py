"""Write ``docs/openapi.json``: what the ``/tier`` calls take and answer, for programs.

    python scripts/write_openapi.py [--check]

All of it is what ``sglang_tiered.api`` declares. ``--check`` writes nothing and exits with 1 where
the file says something else.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

import sglang_tiered
from sglang_tiered.api import CALLS, Call

PAGE = Path(__file__).resolve().parents[1] / "docs" / "openapi.json"
_REFS = "#/components/schemas/{name}"

Schema = dict[str, Any]

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
    "properties": {"error": {"type": "string", "minLength": 1}},
    "required": ["error"],
    "description": "One sentence.",
}


def document() -> Schema:
    """The whole description."""
    told = [*(call.answer for call in CALLS), *CALLS]
    answers, schemas = msgspec.json.schema_components(told, ref_template=_REFS)
    for schema in schemas.values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    for call in CALLS:
        schemas[call.__name__] |= call.rules()
    paths = {
        call.path: _operations(call, schemas[call.__name__]["properties"], answer)
        for call, answer in zip(CALLS, answers, strict=False)
    }
    queries = {call.__name__ for call in CALLS if call.method == "GET"}
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
            "schemas": {
                **{name: schema for name, schema in schemas.items() if name not in queries},
                "Refusal": _REFUSAL,
            },
        },
    }


def _operations(call: type[Call], fields: Schema, answer: Schema) -> Schema:
    operation: Schema = {
        "operationId": call.path.replace("/tier/", f"{call.method.lower()}_"),
        "summary": call.__doc__,
        "responses": _responses(call, answer),
    }
    if call.method == "GET":
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": schema, "style": "form", "explode": False}
            for name, schema in fields.items()
        ]
    else:
        body = {"schema": {"$ref": _REFS.format(name=call.__name__)}}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    return {call.method.lower(): operation}


def _responses(call: type[Call], answer: Schema) -> Schema:
    refusal = {"$ref": _REFS.format(name="Refusal")}
    found = {}
    for status in (200, 401, 403, *call.statuses):
        schema = answer if status < 300 else refusal
        if status == 503 and call.method == "POST":
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
