"""The error tree. A miss is never an error; see ``storage.base`` for outcomes.

    TieredError
    +-- ConfigError             a flag, setting or SGLang that cannot work; exit code 2
    |   +-- SchedulerRefused    one that a scheduler has told already
    +-- TraceError              a recorded workload that cannot be read
    +-- CodecError              an encoded page that does not decode
    +-- TransferError           a KV handoff that cannot work, or a peer that breaks the protocol
    +-- RequestError            a call of ``client`` that was refused, or that nobody answered
    +-- StoreError              a store directory that must not be used
        +-- StoreLockedError    another process holds it
        +-- StoreForeignError   the directory holds something that is not ours
        +-- StoreFormatError    written by a newer version of this package

Every message is one sentence: what is wrong, which value, and the way out.
"""

from __future__ import annotations

from typing import Any


class TieredError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(TieredError, ValueError):
    """A flag or setting that cannot work, or an SGLang that is not the one that was checked."""


class SchedulerRefused(ConfigError):
    """A scheduler process refused its configuration and said so on standard error."""


class TraceError(TieredError, ValueError):
    """A recorded workload that cannot be read."""


class CodecError(TieredError):
    """An encoded page that does not decode: damaged, of another codec, version or layout."""


class TransferError(TieredError):
    """A KV handoff that cannot work, or a peer that breaks the protocol."""


class RequestError(TieredError):
    """A call of ``client`` that was refused, or that nobody answered. ``status`` is that of HTTP,
    None without an answer; ``answer`` is the server's JSON object, empty if it was none."""

    def __init__(
        self, sentence: str, status: int | None = None, answer: dict[str, Any] | None = None
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.answer = answer or {}


class StoreError(TieredError):
    """A store directory that must not be used as it is."""


class StoreLockedError(StoreError):
    """Another process holds the directory."""


class StoreForeignError(StoreError):
    """The directory holds something this package did not write."""


class StoreFormatError(StoreError):
    """The store was written in a newer format than this version reads."""
