"""Checksums (XXH3-64): of pages, and of small files of ours that are whole or nothing: a checksum,
then MessagePack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable


CHECKSUM_BYTES = 8

_T = TypeVar("_T")


def begin_checksum(namespace: bytes, key: bytes) -> xxhash.xxh3_64:
    """Return the checksum of a page whose bytes are still to come."""
    return xxhash.xxh3_64(namespace + key)


def page_checksum(namespace: bytes, key: bytes, segments: Iterable[Any]) -> int:
    """Hash the bytes of a page with its full key and namespace. So a page that a wrong index entry
    names, or that is passed off as another, fails exactly as a damaged one does."""
    state = begin_checksum(namespace, key)
    for segment in segments:
        state.update(segment)
    digest: int = state.intdigest()
    return digest


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
