"""``PinNote``: what a pin tells of its conversation, so that a server started again finds it by its
id and lists it. The store keeps it beside the pin, and does not read it.

The ``extra_key`` and ``cache_salt`` are not in it: who asks must know them.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from sglang_tiered.integration.identity.recent_requests import PrefixSelector
from sglang_tiered.integration.identity.tenants import key_of_request
from sglang_tiered.storage.base import Tier
from sglang_tiered.storage.region import RegionEngine

if TYPE_CHECKING:
    from sglang_tiered.integration.admin.calls import Steps
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.storage.bucket import BucketEngine

__all__ = [
    "NO_NOTE",
    "TOKEN_BYTES",
    "PinNote",
    "as_tokens",
    "keepers",
    "packed",
    "pinned_prefixes",
    "pins_of_prefix",
    "stored_name",
    "unpack",
    "whole_pages",
]

TOKEN_BYTES = 4  # of a note

_VERSION = 1
_DIGEST_BYTES = 16


class PinNote(msgspec.Struct, array_like=True, frozen=True):
    """The tokens that were pinned, and what they are called."""

    version: int
    conversation: str | None
    adapter: str | None  # the id of a LoRA adapter
    pinned_at_s: float  # since 1970
    tokens: bytes  # see ``as_tokens``

    @classmethod
    def of(
        cls, tokens: array[int], conversation: str | None, adapter: str | None, pinned_at_s: float
    ) -> PinNote:
        return cls(_VERSION, conversation, adapter, pinned_at_s, packed(tokens))

    def pack(self) -> bytes:
        """Return it with a digest of the conversation in front, by which it is found."""
        return _digest(self.conversation) + msgspec.msgpack.encode(self)


NO_NOTE = PinNote(_VERSION, None, None, 0.0, b"")
"""Of a pin that lost pages to a forget: what it noted went with them."""


def packed(tokens: array[int]) -> bytes:
    """Return tokens as a note has them: four bytes each, little-endian."""
    return np.frombuffer(tokens, np.int64).astype("<u4").tobytes()


def as_tokens(noted: bytes) -> array[int]:
    """Return the tokens of a note."""
    return array("q", np.frombuffer(noted, "<u4").astype(np.int64).tobytes())


def whole_pages(noted: bytes, page_size: int) -> bytes:
    """Return the tokens of a note that are in whole pages."""
    return noted[: len(noted) - len(noted) % (page_size * TOKEN_BYTES)]


class _NamedNote(NamedTuple):
    """The note of a pin, and the name that stores know the pin by."""

    stored_name: str
    note: PinNote


def keepers(storage: TieredStorage) -> dict[Tier, RegionEngine | BucketEngine]:
    """Return what keeps pins for this rank; nothing where it borrows the pages of another."""
    found: dict[Tier, RegionEngine | BucketEngine] = {}
    if isinstance(storage.region_engine, RegionEngine):
        found[Tier.NVME] = storage.region_engine
    if storage.stack.bucket is not None:
        found[Tier.OBJECT] = storage.stack.bucket
    return found


def stored_name(tenant: bytes, name: str) -> str:
    """Return the name that a store knows a tenant's pin by: tenants do not see each other's."""
    return f"{tenant.hex()}/{name}"


def unpack(data: bytes) -> PinNote | None:
    """Return a note; None for what is none, or of another version."""
    try:
        note = msgspec.msgpack.decode(data[_DIGEST_BYTES:], type=PinNote)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return note if note.version == _VERSION and len(note.tokens) % 4 == 0 else None


def _noted(storage: TieredStorage, tenant: bytes, conversation: str) -> list[_NamedNote]:
    """Return the notes of a conversation's pins on this rank, the latest first. Memory only."""
    digest = _digest(conversation)
    found: list[_NamedNote] = []
    for name, data in _all_notes(storage, tenant):
        if data.startswith(digest):
            note = unpack(data)
            if note is not None and note.conversation == conversation:
                found.append(_NamedNote(name, note))
    return sorted(found, key=lambda each: -each.note.pinned_at_s)


def pinned_prefixes(
    cache: TieredRadixCache,
    tenant: bytes,
    conversation: str,
    extra_key: str | None,
    cache_salt: str | None,
) -> Steps:
    """Return the stored names and prefixes of a conversation's pins, the latest first. All ranks
    return those of the first rank, since a rank may borrow the pages that another has pinned."""
    storage = cache.storage
    own = [] if storage is None else _noted(storage, tenant, conversation)
    told = yield msgspec.msgpack.encode(own)
    found = []  # of the same length everywhere
    for name, note in msgspec.msgpack.decode(told, type=list[_NamedNote]):
        key = cache.hidden_tenants.key_of(key_of_request(extra_key, note.adapter), cache_salt)
        found.append((name, PrefixSelector(as_tokens(note.tokens), key, cache_salt)))
    return found


def pins_of_prefix(cache: TieredRadixCache, tenant: bytes, selector: PrefixSelector) -> Steps:
    """Return the stored names of a tenant's pins with the whole pages of a prefix, whatever they
    are called: those of the first rank, on all ranks. Memory only."""
    storage, page_size = cache.storage, int(cache.page_size)
    pages = whole_pages(packed(selector.tokens), page_size)
    adapter = cache.hidden_tenants.adapter_of(selector.extra_key)
    own = []
    for name, data in [] if storage is None else _all_notes(storage, tenant):
        note = unpack(data) if len(data) >= len(pages) else None
        if note and note.adapter == adapter and whole_pages(note.tokens, page_size) == pages:
            own.append(name)
    return msgspec.msgpack.decode((yield msgspec.msgpack.encode(own)), type=list[str])


def _all_notes(storage: TieredStorage, tenant: bytes) -> list[tuple[str, bytes]]:
    return [note for keeper in keepers(storage).values() for note in keeper.pin_notes(tenant)]


def _digest(conversation: str | None) -> bytes:
    if conversation is None:
        return bytes(_DIGEST_BYTES)
    return hashlib.blake2b(conversation.encode(), digest_size=_DIGEST_BYTES).digest()
