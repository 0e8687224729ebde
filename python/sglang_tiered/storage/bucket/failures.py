"""What can go wrong with a request, without a word of what the library says about it.

The text of a library's error names the endpoint, and a refusal repeats the key id: it is read here
to tell causes apart, and goes no further.
"""

from __future__ import annotations

import enum
import re

__all__ = ["Failure", "RequestError", "explain"]


class Failure(enum.Enum):
    NOT_FOUND = "not_found"  # the object is missing
    BAD_RANGE = "bad_range"  # the object is shorter than it should be
    DENIED = "denied"  # credentials are missing, refused or expired, or the bucket is not there
    UNAVAILABLE = "unavailable"  # no connection, no answer in time, 5xx, throttled


class RequestError(Exception):
    """A request that failed after its retries; ``clause`` may be shown to anyone."""

    def __init__(self, failure: Failure, clause: str) -> None:
        super().__init__(clause)
        self.failure = failure
        self.clause = clause


_STATUS = re.compile(r"status code: (\d{3})")
_CREDENTIALS = re.compile(
    r"ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|TokenRefreshRequired"
)
_METADATA = re.compile(r"/latest/api/token|/latest/meta-data|/computeMetadata/|metadata/identity")
_RANGE = re.compile(r"InvalidRange|StartTooLarge|Wanted range starting")
_DENIED_TYPES = ("PermissionDeniedError", "UnauthenticatedError")


def explain(error: BaseException, kind: str) -> RequestError:
    """Return the cause of an exception that a request of this kind raised."""
    text, name = str(error), type(error).__name__
    match = _STATUS.search(text)
    status = int(match[1]) if match else None

    def said(failure: Failure, what: str) -> RequestError:
        return RequestError(failure, f"{kind} {what}")

    if "NoSuchBucket" in text:
        return said(Failure.DENIED, "found no such bucket")
    if isinstance(error, FileNotFoundError):
        return said(Failure.NOT_FOUND, "found no such object")
    if status == 416 or _RANGE.search(text):
        return said(Failure.BAD_RANGE, "asked beyond the end of an object")
    if _METADATA.search(text):
        return said(Failure.DENIED, "found no credentials in the environment")
    if _CREDENTIALS.search(text):
        return said(Failure.DENIED, "was refused: the credentials are wrong or expired")
    if name in _DENIED_TYPES or isinstance(error, PermissionError) or status in (401, 403):
        return said(Failure.DENIED, "was refused: no permission")
    if "BadScheme" in text:
        return said(Failure.DENIED, "was not sent: the endpoint is not https")
    if status is not None:
        return said(Failure.UNAVAILABLE, f"was answered with status {status}")
    if "Timeout" in text or "TimedOut" in text:
        return said(Failure.UNAVAILABLE, "was not answered in time")
    if "kind: Connect" in text:
        return said(Failure.UNAVAILABLE, "found no connection")
    if isinstance(error, OSError) and error.strerror:
        return said(Failure.UNAVAILABLE, f"failed: {error.strerror}")
    return said(Failure.UNAVAILABLE, f"failed ({name})")
