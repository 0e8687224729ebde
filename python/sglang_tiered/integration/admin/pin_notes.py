"""``PinNote``: what a pin tells of its conversation, so that a server started again finds it by its
id and lists it. The store keeps it beside the pin, and does not read it.

The ``extra_key`` and ``cache_salt`` are not in it: who asks must know them.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sglang_tiered.integration.identity.recent_requests import PrefixSelector
from sglang_tiered.integration.identity.tenants import key_of_request
from sglang_tiered.storage.base import Tier
from sglang_tiered.storage.region import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.integration.admin.calls import Steps
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.storage.bucket import BucketEngine


_VERSION = 1
_TOKEN_BYTES = 4
_DIGEST_BYTES = 16

Pinned = tuple[str | None, bytes]
"""The adapter and the noted tokens of whole pages."""


class PinNote(msgspec.Struct, array_like=True, frozen=True):
    """The tokens that were pinned, and what they are called."""

    version: int
    conversation: str | None
    adapter: str | None  # the id of a LoRA adapter
    pinned_at_s: float  # since 1970
    tokens: bytes  # four bytes each, little-endian

    @classmethod
    def of(
        cls, tokens: array[int], conversation: str | None, adapter: str | None, pinned_at_s: float
    ) -> PinNote:
        return cls(_VERSION, conversation, adapter, pinned_at_s, _packed(tokens))

    def pack(self) -> bytes:
        """Return it with a digest of the conversation in front, by which it is found."""
        return _digest(self.conversation) + msgspec.msgpack.encode(self)

    def pages(self, page_size: int) -> Pinned:
        return self.adapter, _whole_pages(self.tokens, page_size)

    def prefix(self, cache: TieredRadixCache, body: dict[str, Any]) -> PrefixSelector:
        """Return the prefix, of the tenant that a body names."""
        tokens = array("q", np.frombuffer(self.tokens, "<u4").astype(np.int64).tobytes())
        return prefix_of(cache, body, tokens, self.adapter)


NO_NOTE = PinNote(_VERSION, None, None, 0.0, b"")
"""Of a pin that lost pages to a forget: what it noted went with them."""


def unpack(data: bytes) -> PinNote | None:
    """Return a note; None for what is none, or of another version."""
    try:
        note = msgspec.msgpack.decode(data[_DIGEST_BYTES:], type=PinNote)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_known = note.version == _VERSION and len(note.tokens) % _TOKEN_BYTES == 0
    return note if is_known else None


def prefix_of(
    cache: TieredRadixCache, body: dict[str, Any], tokens: array[int], adapter: str | None = None
) -> PrefixSelector:
    """Return a prefix of these tokens, of the tenant that a body names."""
    cache_salt = body.get("cache_salt")
    key = key_of_request(body.get("extra_key"), adapter)
    return PrefixSelector(tokens, cache.hidden_tenants.key_of(key, cache_salt), cache_salt)


def pages_of(cache: TieredRadixCache, selector: PrefixSelector) -> Pinned:
    """Return the whole pages of a prefix as a note of them has them."""
    adapter = cache.hidden_tenants.adapter_of(selector.extra_key)
    return adapter, _whole_pages(_packed(selector.tokens), int(cache.page_size))


def keepers(storage: TieredStorage | None) -> dict[Tier, RegionEngine | BucketEngine]:
    """Return what keeps pins for this rank; nothing where it borrows the pages of another."""
    found: dict[Tier, RegionEngine | BucketEngine] = {}
    if storage is not None and isinstance(storage.region_engine, RegionEngine):
        found[Tier.NVME] = storage.region_engine
    if storage is not None and storage.stack.bucket is not None:
        found[Tier.OBJECT] = storage.stack.bucket
    return found


def stored_name(tenant: bytes, name: str) -> str:
    """Return the name that a store knows a tenant's pin by: tenants do not see each other's."""
    return f"{tenant.hex()}/{name}"


def pins_of_conversation(cache: TieredRadixCache, tenant: bytes, conversation: str) -> Steps:
    """Return the stored names and notes of a conversation's pins, the latest first."""
    digest = _digest(conversation)
    return _noted(cache, tenant, digest, lambda note: note.conversation == conversation)


def pins_of_prefix(cache: TieredRadixCache, tenant: bytes, selector: PrefixSelector) -> Steps:
    """Return the stored names and notes of the pins with the whole pages of a prefix, whatever they
    are called."""
    pages, page_size = pages_of(cache, selector), int(cache.page_size)
    return _noted(cache, tenant, b"", lambda note: note.pages(page_size) == pages)


def _noted(
    cache: TieredRadixCache, tenant: bytes, digest: bytes, is_meant: Callable[[PinNote], bool]
) -> Steps:
    """Return the pins of a tenant that are meant, the latest first. On all ranks they are those of
    the first rank: a rank may borrow the pages that another has pinned. Memory only."""
    own = []
    for keeper in keepers(cache.storage).values():
        for name, data in keeper.pin_notes(tenant):
            note = unpack(data) if data.startswith(digest) else None
            if note is not None and is_meant(note):
                own.append((name, note))
    own.sort(key=lambda each: -each[1].pinned_at_s)
    told = yield msgspec.msgpack.encode(own)
    return msgspec.msgpack.decode(told, type=list[tuple[str, PinNote]])


def _packed(tokens: array[int]) -> bytes:
    return np.frombuffer(tokens, np.int64).astype("<u4").tobytes()


def _whole_pages(noted: bytes, page_size: int) -> bytes:
    return noted[: len(noted) - len(noted) % (page_size * _TOKEN_BYTES)]


def _digest(conversation: str | None) -> bytes:
    if conversation is None:
        return bytes(_DIGEST_BYTES)
    return hashlib.blake2b(conversation.encode(), digest_size=_DIGEST_BYTES).digest()
