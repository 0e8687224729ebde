"""Which prefix a body names, and what a pin notes of its own (``PinNote``), by which a restarted
server finds a conversation by its id and lists it. The store keeps a note beside its pin, and does
not read it.

The ``extra_key`` and ``cache_salt`` are not in a note: who asks must know them.
"""

from __future__ import annotations

import hashlib
from array import array
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_tiered.integration.identity.recent_requests import PrefixSelector, Recent
from sglang_tiered.integration.identity.tenants import key_of_request
from sglang_tiered.storage.base import Erasure, Tier, unique_keys
from sglang_tiered.storage.region import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo

    from sglang_tiered.integration.admin.calls import Steps
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.storage.bucket import BucketEngine


_VERSION = 1
_TOKEN_BYTES = 4
_DIGEST_BYTES = 16

Pages = tuple[str | None, bytes]
"""The adapter and the noted tokens of whole pages."""


def prefix_of_body(cache: TieredRadixCache, body: dict[str, Any]) -> Steps:
    """Return the prefix that a body names, of a conversation the newest; None for a ``rid`` or
    ``conversation_id`` that is not known."""
    found = yield from prefixes_of_body(cache, body, newest=True)
    return found[0] if found else None


def prefixes_of_body(
    cache: TieredRadixCache, body: dict[str, Any], *, newest: bool = False
) -> Steps:
    """Return every prefix that a body names, each as if a request had left it (``Recent``). Of a
    conversation these are those of its recent requests and of its pins, the newest first; of
    ``newest``, at least that. A ``rid`` that comes with the keys of another tenant is not known:
    clients choose it, so another tenant may know it."""
    tenant = tenant_of_body(cache, body)
    if "rid" in body:
        recent = cache.recent_requests.find(body["rid"])
        has_keys = not body.keys().isdisjoint(("extra_key", "cache_salt"))
        if recent is None or (has_keys and recent.tenant != tenant):
            return []
        return [recent]
    if "conversation_id" in body:
        conversation = body["conversation_id"]
        found = cache.recent_requests.of_conversation(tenant, conversation)
        if found and newest:
            return found
        pinned = yield from pins_of_conversation(cache, tenant, conversation)
        prefixes = [note.prefix(cache, body) for _, note in pinned]
        return found + [Recent("", each, tenant, conversation, 0, 0.0) for each in prefixes]
    selector = prefix_of(cache, body, array("q", body["input_ids"]))
    return [Recent("", selector, tenant, None, 0, 0.0)]


def tenant_of_body(cache: TieredRadixCache, body: dict[str, Any]) -> bytes:
    """Return the tenant that a body's ``extra_key`` and ``cache_salt`` name."""
    key = key_of_request(body.get("extra_key"), None)
    return cache.hidden_tenants.tenant_of(key, body.get("cache_salt"))


def prefix_of(
    cache: TieredRadixCache, body: dict[str, Any], tokens: array[int], adapter: str | None = None
) -> PrefixSelector:
    """Return a prefix of these tokens, of the tenant that a body names."""
    cache_salt = body.get("cache_salt")
    key = key_of_request(body.get("extra_key"), adapter)
    return PrefixSelector(tokens, cache.hidden_tenants.key_of(key, cache_salt), cache_salt)


def key_of(cache: TieredRadixCache, selector: PrefixSelector) -> RadixKey:
    """Return the key of a prefix's whole pages, by which requests go now. Any thread."""
    return RadixKey(
        selector.tokens,
        extra_key=cache.hidden_tenants.key_of(selector.extra_key, selector.cache_salt),
        is_bigram=cache.tree_core.is_eagle,
        cache_salt=selector.cache_salt,
    ).page_aligned(cache.page_size)


def locate(
    cache: TieredRadixCache, selector: PrefixSelector
) -> tuple[RadixKey, Sequence[TreePathNodeInfo], int, int]:
    """Return the key of a prefix's whole pages, the nodes of the tree that hold the first of them,
    and how many tokens device and host memory hold."""
    key = key_of(cache, selector)
    if len(key) == 0:
        return key, (), 0, 0
    match = cache.match_visible(key)
    path = cache.tree_core.collect_path_info([match.best_match_node])[0]
    in_host = takewhile(lambda node: cache.tree_core.is_backuped(node.node_id), path)
    num_host_tokens = max((node.path_end for node in in_host), default=0)
    return key, path, int(match.device_prefix_len), num_host_tokens


def erasure_of(
    number: str, *, tenant: bytes | None = None, hashes: Iterable[str] | None = None
) -> Erasure:
    """Return what a call erases. Its id is the same on every rank, which a bucket or a peer would
    take for another server otherwise."""
    keys = None if hashes is None else unique_keys(map(bytes.fromhex, hashes))
    digest = hashlib.blake2b(number.encode(), digest_size=16, person=b"sgltiered-erase")
    digest.update(b"".join([tenant or b"", *(keys or ())]))
    return Erasure(keys, tenant, digest.digest())


# ---- What pins note ----


class PinNote(msgspec.Struct, array_like=True, frozen=True):
    """The tokens that were pinned, and what they are called."""

    version: int
    conversation: str | None
    adapter: str | None  # the id of a LoRA adapter
    pinned_at_s: float  # since 1970
    tokens: bytes  # four bytes each, little-endian

    def pages(self, page_size: int) -> Pages:
        return self.adapter, _whole_pages(self.tokens, page_size)

    def prefix(self, cache: TieredRadixCache, body: dict[str, Any]) -> PrefixSelector:
        """Return the prefix, of the tenant that a body names."""
        tokens = array("q", np.frombuffer(self.tokens, "<u4").astype(np.int64).tobytes())
        return prefix_of(cache, body, tokens, self.adapter)


NO_NOTE = PinNote(_VERSION, None, None, 0.0, b"")
"""Of a pin that lost pages to a forget: what it noted went with them."""


def pack_note(cache: TieredRadixCache, named: Recent, pinned_at_s: float) -> bytes:
    """Return the note of a prefix, with a digest of its conversation in front, by which it is
    found."""
    selector, conversation = named.selector, named.conversation
    adapter = cache.hidden_tenants.adapter_of(selector.extra_key)
    tokens = _packed(selector.tokens)
    note = PinNote(_VERSION, conversation, adapter, pinned_at_s, tokens)
    return _digest(conversation) + msgspec.msgpack.encode(note)


def unpack(data: bytes) -> PinNote | None:
    """Return a note; None for what is none, or of another version."""
    try:
        note = msgspec.msgpack.decode(data[_DIGEST_BYTES:], type=PinNote)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_known = note.version == _VERSION and len(note.tokens) % _TOKEN_BYTES == 0
    return note if is_known else None


def pages_of(cache: TieredRadixCache, selector: PrefixSelector) -> Pages:
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
