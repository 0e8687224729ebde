"""Every message between page servers and their clients. The table stands in ``README.md`` here.

A message is a version frame, one MessagePack frame and, for ``Found``, payload frames. A page is
asked for by namespace, full key and length, and its checksum binds its bytes to all of these, so
neither a holder nor a message can pass one page off as another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import xxhash

from sglang_tiered.errors import TransferError
from sglang_tiered.wire.sockets import decode, encode, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "KEY_BYTES",
    "MAX_CLIENT_FRAME_BYTES",
    "MAX_PAGE_BYTES",
    "MAX_REQUEST_PAGES",
    "NAMESPACE_BYTES",
    "VERSION_FRAME",
    "Busy",
    "Cancel",
    "Fetch",
    "Found",
    "Refuse",
    "check_version",
    "decode_from_client",
    "decode_from_server",
    "encode",
    "page_checksum",
]

MAGIC = b"sgt-pages/"
VERSION = 1
VERSION_FRAME = MAGIC + str(VERSION).encode()

NAMESPACE_BYTES = 32
KEY_BYTES = 32
MAX_PAGE_BYTES = 64 << 20
"""Bounds one page, and all pages of one request: the memory that a lying peer can cost."""

MAX_REQUEST_PAGES = 4096
MAX_CLIENT_FRAME_BYTES = 256 << 10
"""A client that sends a longer frame is disconnected. The largest request is shorter."""

Number = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE_BYTES)]
Checksum = Annotated[int, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Messages are arrays on the wire, without field names, so any change is a new version."""


class Fetch(_Message, frozen=True, tag="fetch"):
    """Asks for pages. The client stops waiting after ``patience_ms``."""

    number: Number
    namespace: Annotated[
        bytes, msgspec.Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)
    ]
    keys: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES * MAX_REQUEST_PAGES)]
    lengths: Annotated[list[Length], msgspec.Meta(min_length=1, max_length=MAX_REQUEST_PAGES)]
    patience_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]

    def split_keys(self) -> list[bytes]:
        """One key per page. Raises ``TransferError`` for a breach of the protocol."""
        keys = [self.keys[i : i + KEY_BYTES] for i in range(0, len(self.keys), KEY_BYTES)]
        if len(self.keys) != KEY_BYTES * len(self.lengths):
            raise TransferError(f"a client named {len(self.lengths)} pages by {len(keys)} keys.")
        if len(set(keys)) != len(keys):
            raise TransferError("a client asked for the same page twice at once.")
        if self.num_bytes > MAX_PAGE_BYTES:
            raise TransferError(f"a client asked for {self.num_bytes} bytes at once.")
        return keys

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths)


class Cancel(_Message, frozen=True, tag="cancel"):
    """The client no longer waits for that request. It is answered nevertheless."""

    number: Number


class Found(_Message, frozen=True, tag="found"):
    """The answer to a ``Fetch``: a checksum for each page, or None if it is not held under that
    length. The payload frames, however they are cut, hold the bytes of the held pages in order."""

    number: Number
    checksums: Annotated[list[Checksum | None], msgspec.Meta(max_length=MAX_REQUEST_PAGES)]


class Busy(_Message, frozen=True, tag="busy"):
    """The answer to a ``Fetch`` that the server has no capacity for, or whose client stopped
    waiting before its turn came."""

    number: Number


class Refuse(_Message, frozen=True, tag="refuse"):
    """The answer to a message of another protocol or version."""

    reason: str


_from_client = msgspec.msgpack.Decoder(Fetch | Cancel)
_from_server = msgspec.msgpack.Decoder(Found | Busy | Refuse)


def decode_from_client(frames: Sequence[Any]) -> Fetch | Cancel:
    """A client's message, from its version frame and body. Raises ``TransferError`` for anything
    else."""
    check_version(frames, "a client")
    if len(frames) != 2:
        raise TransferError(f"a client sent a message of {len(frames)} frames.")
    message: Fetch | Cancel = decode(frames[1], _from_client)
    return message


def decode_from_server(frames: Sequence[Any]) -> Found | Busy | Refuse:
    """A server's message, likewise; payload frames may follow a ``Found``."""
    check_version(frames, "a page server")
    if len(frames) < 2:
        raise TransferError("a page server sent a message of one frame.")
    message: Found | Busy | Refuse = decode(frames[1], _from_server)
    return message


def check_version(frames: Sequence[Any], who: str) -> None:
    """Raises ``TransferError`` when ``who`` speaks another version, or another protocol."""
    frame = bytes(frames[0][:32]) if frames else b""
    if frame == VERSION_FRAME:
        return
    if frame.startswith(MAGIC):
        theirs = printable(frame[len(MAGIC) :][:8].decode("ascii", "replace"))
        raise TransferError(
            f"{who} speaks version {theirs} of the page protocol and this server version "
            f"{VERSION}; run the same release of sglang-tiered on both."
        )
    raise TransferError(f"{who} does not speak the page protocol.")


def page_checksum(namespace: bytes, key: bytes, segments: Iterable[Any]) -> int:
    """XXH3-64 of the namespace, the key and the page's bytes."""
    state = xxhash.xxh3_64(namespace)
    state.update(key)
    for segment in segments:
        state.update(segment)
    digest: int = state.intdigest()
    return digest
