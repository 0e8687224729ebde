"""``docs/openapi.json``: what it admits of bodies and answers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"


@cache
def described() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_PAGE.read_text(encoding="utf-8"))
    return found


def _validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": described()["components"]})


def is_admitted(path: str, body: Any) -> bool:
    content = described()["paths"][path]["post"]["requestBody"]["content"]
    return bool(_validator(content["application/json"]["schema"]).is_valid(body))


def check_answer(method: str, path: str, status: int, answer: Any) -> None:
    """Fail where an answer has a status or fields that are not described."""
    responses = described()["paths"][path.partition("?")[0]][method.lower()]["responses"]
    assert str(status) in responses, f"{method} {path} answered {status}"
    _validator(responses[str(status)]["content"]["application/json"]["schema"]).validate(answer)
