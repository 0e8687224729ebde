"""Causes are told apart, and nothing of what a library says gets through."""

from __future__ import annotations

import pytest

from sglang_tiered.storage.bucket.requests import Failure, explain


class GenericError(Exception):
    """As the library's."""


SECRET = "AKIAEXAMPLE http://192.0.2.7:9000/bucket"


def status(code: int, rest: str = "") -> GenericError:
    return GenericError(f"{SECRET} - Server returned non-2xx status code: {code} {rest}")


@pytest.mark.parametrize(
    ("error", "failure", "says"),
    [
        (FileNotFoundError(SECRET), Failure.NOT_FOUND, "no such object"),
        (FileNotFoundError("<Code>NoSuchBucket</Code>"), Failure.DENIED, "no such bucket"),
        (status(416, "Range Not Satisfiable"), Failure.BAD_RANGE, "beyond the end"),
        (status(503, "SlowDown"), Failure.UNAVAILABLE, "status 503"),
        (status(400, "<Code>ExpiredToken</Code>"), Failure.DENIED, "wrong or expired"),
        (PermissionError(13, SECRET), Failure.DENIED, "no permission"),
        (GenericError("kind: Timeout " + SECRET), Failure.UNAVAILABLE, "in time"),
        (GenericError("kind: Connect, " + SECRET), Failure.UNAVAILABLE, "no connection"),
        (GenericError("PUT http://192.0.2.1/latest/api/token"), Failure.DENIED, "no credentials"),
        (GenericError("source: BadScheme"), Failure.DENIED, "not https"),
        (OSError(5, "Input/output error", SECRET), Failure.UNAVAILABLE, "Input/output error"),
        (GenericError(SECRET), Failure.UNAVAILABLE, "failed (GenericError)"),
    ],
)
def test_a_cause_is_recognized_without_showing_secrets(
    error: Exception, failure: Failure, says: str
) -> None:
    found = explain(error, "get")
    assert found.failure is failure
    assert found.clause.startswith("get ")
    assert says in found.clause
    assert "AKIA" not in repr(found) + found.clause
    assert "192.0.2" not in found.clause
