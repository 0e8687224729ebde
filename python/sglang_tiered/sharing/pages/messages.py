"""Every message between page servers and their clients. The table stands in ``README.md`` here.

A message is a version frame, one MessagePack frame and, for ``Found`` and ``Changes``, payload
frames. A page is asked for by namespace, full key and length, and its checksum binds its bytes to
all of these. So neither a holder nor a message can pass one page off as another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from sglang_tiered.errors import TransferError
from sglang_tiered.wire.sockets import Message, check_version, decode

if TYPE_CHECKING:
    from collections.abc import Sequence


MAGIC = b"sgt-pages/"
VERSION = 3
VERSION_FRAME = MAGIC + str(VERSION).encode()

NAMESPACE_BYTES = 32
KEY_BYTES = 32
MAX_PAGE_BYTES = 64 << 20
"""Bounds one page, and all pages of one request."""

MAX_REQUEST_PAGES = 4096
MAX_CLIENT_FRAME_BYTES = 512 << 10
"""A client that sends a longer frame is disconnected. The largest request is shorter."""

ID_BYTES = 16
SHORT_ID_BYTES = 8
"""Of the id of an erasure, where both sides only compare which they know."""

MAX_FINGERPRINTS = 65_536
"""Bounds the fingerprints of one answer: half a mebibyte."""

MAX_ERASED_KEYS = 1024
"""Bounds the keys of one erasure here; more keys are several."""

MAX_ERASURES_BYTES = 384 << 10
"""Bounds what is known of erasures in one message, either way: a client's frame is not longer."""

MAX_FOLLOW_FRAME_BYTES = 1 << 20
"""A follower ends a connection over which a longer frame comes."""

Number = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE_BYTES)]
Checksum = Annotated[int, msgspec.Meta(ge=0)]


Count = Annotated[int, msgspec.Meta(ge=0)]
Namespace = Annotated[bytes, msgspec.Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
Id = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
ShortIds = Annotated[bytes, msgspec.Meta(max_length=MAX_ERASURES_BYTES)]


class Fetch(Message, frozen=True, tag="fetch"):
    """Asks for pages. The client stops waiting after ``patience_ms``."""

    number: Number
    namespace: Namespace
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


class Follow(Message, frozen=True, tag="follow"):
    """Asks what changed of the pages that a server holds, since ``sequence`` of ``epoch``, or for
    those whose fingerprint is ``cursor`` or more. Answered by ``Changes``: at once where there is
    something to say, else when there is, or as a sign of life."""

    namespace: Namespace
    server: Id  # the follower's own
    digest: Id  # of the erasures that the follower has applied
    told: Id  # the server's digest, as far as the follower knows
    epoch: Count
    sequence: Count
    cursor: Count | None  # None: it has all of them, as of ``sequence`` or later


class Compare(Message, frozen=True, tag="compare"):
    """Names the erasures that the client knows, as their digests differ. Answered by
    ``Erasures``."""

    namespace: Namespace
    ids: ShortIds


class ErasureNotice(Message, frozen=True):
    """One erasure: of pages, of a tenant, or of everything. ``age_s``: since it was begun, by the
    clock of who says so."""

    id: Id
    age_s: Annotated[float, msgspec.Meta(ge=0)]
    tenant: Id | None
    keys: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES * MAX_ERASED_KEYS)] | None

    def split_keys(self) -> list[bytes] | None:
        """One key per page, or None. Raises ``TransferError`` for a breach of the protocol."""
        if self.keys is None:
            return None
        keys = [self.keys[i : i + KEY_BYTES] for i in range(0, len(self.keys), KEY_BYTES)]
        if not keys or len(keys[-1]) != KEY_BYTES or len(set(keys)) != len(keys):
            raise TransferError("an erasure of another server names no pages, or one twice.")
        return keys


class Teach(Message, frozen=True, tag="teach"):
    """Erasures that the server does not know. It applies them, and has another digest then."""

    namespace: Namespace
    erasures: list[ErasureNotice]


class Found(Message, frozen=True, tag="found"):
    """The answer to a ``Fetch``: a checksum for each page, or None if it is not held under that
    length. The payload frames, however they are cut, hold the bytes of the held pages in order."""

    number: Number
    checksums: Annotated[list[Checksum | None], msgspec.Meta(max_length=MAX_REQUEST_PAGES)]


class Changes(Message, frozen=True, tag="changes"):
    """The answer to a ``Follow``. Payload: the fingerprints of the pages that came, then of those
    that went, 8 bytes each. With ``start`` it is a piece of a snapshot: all fingerprints from there
    to ``end`` (None: to the last) that the server has, of ``sequence`` or later. ``more``: ask
    again, there is more."""

    namespace: Namespace  # the server's; its SHA-256 to who asks for another
    server: Id
    digest: Id  # of the erasures that the server has applied
    epoch: Count  # of the numbers: another one begins with a snapshot
    sequence: Count
    start: Count | None
    end: Count | None
    num_added: Annotated[int, msgspec.Meta(ge=0, le=MAX_FINGERPRINTS)]
    num_removed: Annotated[int, msgspec.Meta(ge=0, le=MAX_FINGERPRINTS)]
    more: bool


class Erasures(Message, frozen=True, tag="erasures"):
    """The answer to a ``Compare``: of the erasures that the client does not know as many as fit,
    oldest first, and which ones the server lacks, as of its ``digest``."""

    digest: Id
    erasures: list[ErasureNotice]
    lacking: ShortIds


class Busy(Message, frozen=True, tag="busy"):
    """The answer to a ``Fetch`` that the server has no capacity for, or whose client stopped
    waiting before its turn came."""

    number: Number


class Refuse(Message, frozen=True, tag="refuse"):
    """The answer to a message of another protocol or version."""

    reason: str


FromClient = Fetch | Follow | Compare | Teach
FromServer = Found | Busy | Refuse | Changes | Erasures

_from_client = msgspec.msgpack.Decoder(FromClient)
_from_server = msgspec.msgpack.Decoder(FromServer)


def decode_from_client(frames: Sequence[Any]) -> FromClient:
    """A client's message, from its version frame and body. Raises ``TransferError`` for anything
    else."""
    _check_version(frames, "a client")
    if len(frames) != 2:
        raise TransferError(f"a client sent a message of {len(frames)} frames.")
    message: FromClient = decode(frames[1], _from_client)
    return message


def decode_from_server(frames: Sequence[Any]) -> FromServer:
    """A server's message, likewise; payload frames may follow a ``Found`` or ``Changes``."""
    _check_version(frames, "a page server")
    if len(frames) < 2:
        raise TransferError("a page server sent a message of one frame.")
    message: FromServer = decode(frames[1], _from_server)
    return message


def _check_version(frames: Sequence[Any], who: str) -> None:
    check_version(frames[0] if frames else b"", MAGIC, VERSION, who, "page")
