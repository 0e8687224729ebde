"""Small files of ours that are whole or nothing: a checksum (XXH3-64), then MessagePack."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import xxhash

__all__ = ["seal", "unseal"]

CHECKSUM_BYTES = 8

_T = TypeVar("_T")


def seal(value: Any) -> bytes:
    body = msgspec.msgpack.encode(value)
    return xxhash.xxh3_64_digest(body) + body


def unseal(data: bytes, kind: type[_T]) -> _T | None:
    """What was sealed; None if a byte of it is not what was written, or it is of another kind."""
    checksum, body = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(body) != checksum:
        return None
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
