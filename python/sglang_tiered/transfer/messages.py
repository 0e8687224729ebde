"""Every message on the wire. The table and the state diagram stand in README.md.

A message is a version frame, one MessagePack frame and, for data, an authenticator and a payload.
Nothing is unpickled, and nothing in a message determines where bytes are written: destinations come
from the receiver's own room table. The version frame never changes, so a peer of another version
can be told so.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated, NamedTuple

import msgspec

from sglang_tiered.wire import sockets
from sglang_tiered.wire.keys import KEY_BYTES
from sglang_tiered.wire.sockets import Message

MAGIC = b"sgt-kv/"
VERSION = 6
VERSION_FRAME = MAGIC + str(VERSION).encode()

MAX_FRAME_BYTES = 256 << 20
"""A prefill instance that sends a longer frame is disconnected. Slabs are far shorter."""

MAX_CONTROL_BYTES = 4 << 20
"""The same for messages without pages, and so for all messages from a decode instance."""

TOKEN_BYTES = 16
MODEL_BYTES = 32
"""A digest of model, weights and number formats: KV of another one is noise to its receiver."""

TOKENS_BYTES = 20
"""A digest of a request's tokens, in the place of the last bytes of the model's."""

MAX_CONNECTIONS = 64
KV_COMPONENT = -1
"""``component`` of the KV pages themselves; 0 and up are state components (SWA, Mamba, ...)."""

PLAIN, ENCODED, NAMED = range(3)
"""``Slab.form``: the payload is the pages' bytes; an encoded page (``codecs``); or ``WHERE``, and
the numbers of pages that the receiver reads in the sender's memory, int32 in little endian."""

WHERE = struct.Struct("<QQ")
"""The address of a fence and its value. What was read is valid if it is still there afterwards."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
# Bounds the cost of a stranger's message: no model has so many buffers or states.
Many = msgspec.Meta(max_length=4096)
Counts = Annotated[list[Count], Many]
Positives = Annotated[list[Positive], Many]
Word = Annotated[str, msgspec.Meta(max_length=64)]
Short = Annotated[bytes, msgspec.Meta(max_length=64)]
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
Model = Annotated[bytes, msgspec.Meta(min_length=MODEL_BYTES, max_length=MODEL_BYTES)]
# Bounds what decode keeps of a room: a number for each of its messages.
Seq = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
Place = Annotated[str, msgspec.Meta(max_length=300)]


class StateLayout(Message, frozen=True):
    """One state component: its kind, and the bytes of one row of each of its buffers."""

    kind: Word
    row_bytes: Positives


class KVLayout(Message, frozen=True):
    """What one rank's KV looks like in memory, to pair the buffers of two ranks.

    ``page_bytes`` and ``layer_ids`` have one entry per buffer (K or V of one layer, or both for
    latent attention). ``total_heads`` is 0 where a page is not split over ranks by heads.
    ``element`` is float32, float16 or bfloat16, or empty; ``codec`` how pages travel.
    """

    page_size: Positive  # tokens
    dtype: Word
    page_bytes: Positives
    layer_ids: Annotated[list[int], Many]
    tp_rank: Count
    tp_size: Positive
    total_heads: Count
    states: Annotated[list[StateLayout], msgspec.Meta(max_length=64)]
    aux_bytes: Positives
    element: Word = ""
    codec: Word = "none"


# Control channel, decode to prefill.


class Hello(Message, frozen=True, tag="hello"):
    """Opens a session. ``instance`` changes with every start of the process. ``server``: where it
    answers requests, for who reads of it."""

    instance: Short
    server: Place
    layout: KVLayout
    window_bytes: Positive


class Claim(Message, frozen=True, tag="claim"):
    """A request of this room is here, and its pages will be allocated when there is memory. If this
    session ends before ``Open``, the room will not be opened. ``model``: as in ``Open``."""

    room: int
    model: Model


class Open(Message, frozen=True, tag="open"):
    """The pages of a room are allocated; ``num_receivers`` such messages make it complete.
    ``model``: digest of what gives KV its meaning, as decode has it now (``Asked.of``)."""

    room: int
    generation: int
    num_pages: Count
    num_state_rows: Counts
    prefix_tokens: Count
    num_receivers: Positive
    is_dummy: bool
    model: Model


class Abort(Message, frozen=True, tag="abort"):
    room: int
    generation: int
    reason: str


class Ping(Message, frozen=True, tag="ping"):
    """A sign of life. ``number`` counts the control messages since Hello, without pings."""

    number: int


# Control channel, prefill to decode.


class Welcome(Message, frozen=True, tag="welcome"):
    """The session exists. ``key`` authenticates data headers; empty without keys. ``door``: the
    abstract Unix socket where a decode rank of the same machine asks for the pages' addresses."""

    instance: Short
    session: Token
    rank: int
    layout: KVLayout
    data_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    num_connections: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONNECTIONS)]
    key: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)]
    door: Word | None


class Refuse(Message, frozen=True, tag="refuse"):
    reason: str


class Failed(Message, frozen=True, tag="failed"):
    room: int
    generation: int
    reason: str


class Pong(Message, frozen=True, tag="pong"):
    """A sign of life, unasked. ``number`` counts the control messages since Welcome, without
    pongs."""

    number: int


class Bye(Message, frozen=True, tag="bye"):
    """Ends the session, from either side; every room open in it has failed."""

    reason: str


# Data channel, decode to prefill.


class Join(Message, frozen=True, tag="join"):
    """The first message of each data connection; ``proof`` is keyed by ``Welcome.key``."""

    session: Token
    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CONNECTIONS)]
    proof: Short

    def proven(self) -> tuple[bytes, bytes]:
        """The parts that ``proof`` authenticates."""
        return self.session, bytes([self.index])


class Ack(Message, frozen=True, tag="ack"):
    """Slabs (room, generation, seq) that landed, were superfluous, or whose room is gone."""

    slabs: Annotated[list[tuple[int, int, int]], Many]


class Nack(Message, frozen=True, tag="nack"):
    """A slab arrived damaged, or pages could not be read, and must be sent again."""

    room: int
    generation: int
    seq: Seq


# Data channel, prefill to decode. An authenticator frame follows; then, for slabs, the payload.


class Slab(Message, frozen=True, tag="slab"):
    """Pages [start, start + num_pages) of a room, of ``num_pairs`` consecutive buffer pairs.

    The pages' bytes are [pair, page, bytes] in C order, and the payload stands for them as ``form``
    says; ``xxh3`` is the 64-bit XXH3 of the payload. The authenticator of ``NAMED`` covers header
    and payload under ``Offer.key``, with --transfer-keys and without. After a Nack its pages come
    as bytes.
    """

    room: int
    generation: int
    seq: Seq
    component: int
    first_pair: Count
    num_pairs: Count
    start: Count
    num_pages: Count
    form: Annotated[int, msgspec.Meta(ge=PLAIN, le=NAMED)]
    xxh3: int


class Last(Message, frozen=True, tag="last"):
    """Everything of a room was sent: ``num_slabs`` messages. ``aux`` are its metadata rows."""

    room: int
    generation: int
    num_slabs: Seq
    aux: Annotated[list[bytes], Many]


# At the door, prefill to decode.


class Offer(Message, frozen=True, tag="offer"):
    """Where the pages are: address, bytes and bytes per page of each buffer. ``key``, which is sent
    nowhere else, authenticates every ``NAMED`` slab, so a relay cannot make one."""

    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    buffers: Annotated[list[tuple[Count, Count, Positive]], Many]


AnyFromDecode = Hello | Claim | Open | Abort | Ping | Bye
AnyFromPrefill = Welcome | Refuse | Failed | Pong | Bye
AnyDataFromDecode = Join | Ack | Nack
AnyDataFromPrefill = Slab | Last


def peer_failed(reason: str) -> str:
    """The reason of a room that failed because of its other end, in the words by which SGLang's
    clients recognize a request that is worth sending again."""
    return f"PD peer failed: {reason}"


class Asked(NamedTuple):
    """What one request adds to the model: digests of its adapter (empty without one) and of its
    tokens (``TOKENS_BYTES``; empty where the caller binds none)."""

    adapter: bytes = b""
    tokens: bytes = b""

    def of(self, model: bytes) -> bytes:
        """What ``Claim`` and ``Open`` name: of the model and adapter, then of the tokens."""
        if self.adapter:
            model = hashlib.sha256(model + self.adapter).digest()
        return model[: MODEL_BYTES - len(self.tokens)] + self.tokens


NOTHING_MORE = Asked()

OTHER_MODEL = "whose KV differs"
OTHER_PROMPT = "were sent different prompts"
CHANGED = "changed while the request was under way; send it again"


def is_other_model(reason: str) -> bool:
    """Whether a room failed because its ends have, or had, different models: another pair may
    serve it."""
    return OTHER_MODEL in reason or CHANGED in reason


def is_other_prompt(reason: str) -> bool:
    """Whether a room failed because its ends have different tokens: no pair may serve it."""
    return OTHER_PROMPT in reason


def mismatch(prefill: str, sent: bytes, decode: str, wanted: bytes, note: str = "") -> str:
    """The sentence of a pair whose models or prompts differ (``Asked.of``): both addresses, what
    differs, the way out."""
    num_model = MODEL_BYTES - TOKENS_BYTES
    if sent[:num_model] == wanted[:num_model]:
        return (
            f"prefill at {prefill} and decode at {decode} {OTHER_PROMPT} with one bootstrap_room; "
            "send both the same request, with a number of its own, and serve both with one "
            "tokenizer and chat template"
        )
    return (
        f"prefill at {prefill} has the model {sent.hex()[:16]} and decode at {decode} the model "
        f"{wanted.hex()[:16]}, {OTHER_MODEL}; serve the same weights with the same settings and "
        f"SGLang on both, or declare them equal with --transfer-model{note and f' ({note})'}"
    )


def check_version(frame: bytes, who: str) -> None:
    """Raises ``TransferError`` when ``who`` speaks another version, or another protocol."""
    sockets.check_version(frame, MAGIC, VERSION, who, "KV transfer")


control_from_decode = msgspec.msgpack.Decoder(AnyFromDecode)
control_from_prefill = msgspec.msgpack.Decoder(AnyFromPrefill)
data_from_decode = msgspec.msgpack.Decoder(AnyDataFromDecode)
data_from_prefill = msgspec.msgpack.Decoder(AnyDataFromPrefill)
offer = msgspec.msgpack.Decoder(Offer)
