"""Residency and checkpoints of conversations in a scheduler process, and which prefix a body names.

The scheduler thread reads memory and queues stores. Work that waits for a disk or a network
(``make_durable``) runs on threads, and the caller polls until it is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_tiered.api import CallError
from sglang_tiered.integration.admin.calls import UNKNOWN, has_ended, outcome, store_of
from sglang_tiered.integration.admin.pin_notes import pins_of_conversation, prefix_of
from sglang_tiered.integration.cache.small_host import is_storing
from sglang_tiered.integration.identity.recent_requests import Recent
from sglang_tiered.integration.identity.tenants import key_of_request
from sglang_tiered.integration.storage.host_pages import page_bytes
from sglang_tiered.storage.base import Erasure, Run, Tier, unique_keys
from sglang_tiered.storage.promises import ended
from sglang_tiered.storage.region import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo

    from sglang_tiered.integration.admin.calls import Steps
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.identity.recent_requests import PrefixSelector
    from sglang_tiered.integration.storage.backend import TieredStorage


STAGED = (
    "nothing is promised with --pp-size above 1, as no stage of a pipeline knows what the others "
    "hold; NVMe gets the pages all the same"
)
NO_OBJECT_TIER = "this server has no object tier; start it with --tier-object-url"
NOT_WRITTEN = "the tier did not take the change of the pin; see the server's log, and ask again"

_OFFER_AGAIN_S = 1.0
_workers = ThreadPoolExecutor(4, thread_name_prefix="tier-checkpoint")

WORK_S = 25.0
"""Time after which a checkpoint reports what is missing; shorter than the wait of the HTTP client's
request (``service.TIMEOUT_S``)."""

_LOOK_S = 0.02
_AGAIN_S = 1.0
_BATCH_BYTES = 8 << 20


def make_durable(
    storage: TieredStorage, hashes: Sequence[str], tier: Tier, tenant: bytes, work_s: float = WORK_S
) -> int:
    """Wait until pages are durable in a tier, and return how many leading ones are. For NVMe, pages
    that only the bucket or other servers hold are loaded and stored under their tenant. Never on
    the scheduler thread."""
    if work_s <= 0:
        return 0  # nobody waits for it any more, and the next ones need the thread
    shard, stack = storage.region_engine, storage.stack
    if not isinstance(shard, RegionEngine):
        return len(hashes)  # decided by the rank that keeps the pages
    deadline = time.monotonic() + work_s
    keys = storage.keys_of_pools(hashes)
    wanted = keys[: len(hashes)]  # KV pages; the other pools hold only some
    is_below = tier is Tier.OBJECT and stack.bucket is not None
    brings_up_at = 0.0
    while (now := time.monotonic()) < deadline:
        held = shard.view.contains(wanted)
        if is_below:
            below = stack.contains_in_bucket(wanted)
            held = [up or down for up, down in zip(held, below, strict=True)]
        if all(held):
            break
        if stack.remote and not is_below and now >= brings_up_at:
            _bring_up(storage, shard, hashes, tenant, deadline)
            brings_up_at = time.monotonic() + _AGAIN_S
        time.sleep(_LOOK_S)
    left_s = max(1.0, deadline - time.monotonic())
    if is_below:
        return _leading(stack.flush_to_bucket(keys, left_s)[: len(hashes)])
    before = shard.view.contains(wanted)  # the barrier may miss later ones
    is_synced = shard.flush(left_s)
    after = shard.view.contains(wanted)
    shard.view.use(keys)  # counts as use: reclaim keeps them longer
    held = [was and is_held for was, is_held in zip(before, after, strict=True)]
    return _leading(held) if is_synced else 0


def _bring_up(
    storage: TieredStorage,
    shard: RegionEngine,
    hashes: Sequence[str],
    tenant: bytes,
    deadline: float,
) -> None:
    """Load pages that NVMe lacks and remote tiers hold into private memory, which stores them on
    NVMe as well. Ends early where NVMe does not take them or no tier serves them."""
    stack = storage.stack
    keys, number = storage.keys_of_pools(hashes), len(hashes)
    for at, num_bytes in enumerate(_page_bytes(storage)):
        of_pool = keys[at * number : (at + 1) * number]
        pages = zip(
            of_pool, shard.view.contains(of_pool), stack.contains_remote(of_pool), strict=True
        )
        lacking = [key for key, is_here, is_far in pages if is_far and not is_here]
        size = max(1, _BATCH_BYTES // num_bytes)
        for start in range(0, len(lacking), size):
            batch = tuple(lacking[start : start + size])
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            room = memoryview(bytearray(len(batch) * num_bytes))
            buffers = tuple((room[i * num_bytes : (i + 1) * num_bytes],) for i in range(len(batch)))
            job = stack.submit_load(Run(batch, buffers), deadline_s=left_s, tenant=tenant)
            job.wait()
            loaded = [key for key, is_ok in zip(batch, job.ok, strict=True) if is_ok]
            if not loaded or not _wait_until_kept(shard, loaded, deadline):
                return


def _wait_until_kept(shard: RegionEngine, keys: Sequence[bytes], deadline: float) -> bool:
    deadline = min(deadline, time.monotonic() + _AGAIN_S)
    while not all(shard.view.contains(keys)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _page_bytes(storage: TieredStorage) -> list[int]:
    """Return the bytes of a page in each pool, in the order of ``keys_of_pools``."""
    pools = {PoolName.KV: storage.mem_pool_host, **getattr(storage, "registered_pools", {})}
    return [page_bytes(pool) for pool in pools.values()]


def _leading(held: Sequence[bool]) -> int:
    return held.index(False) if False in held else len(held)


class Located(NamedTuple):
    """The key of a prefix's whole pages, and the nodes of the tree that hold the first of them."""

    key: RadixKey
    path: tuple[TreePathNodeInfo, ...]
    num_device_tokens: int
    num_host_tokens: int


def residency(cache: TieredRadixCache, _: str, body: dict[str, Any]) -> Steps:
    """Tell how many leading tokens each tier holds by itself. Reads memory only."""
    named = yield from prefix_of_body(cache, body)
    if named is None:
        return UNKNOWN
    located = locate(cache, named.selector)
    storage, page_size = cache.storage, int(cache.page_size)
    held = {"device": located.num_device_tokens, "host": located.num_host_tokens}
    if storage is not None:
        for tier, num_pages in storage.pages_by_tier(cache.page_hashes(located.key)).items():
            held[tier.value] = num_pages * page_size
    least = yield list(held.values())
    counts = dict(zip(held, least, strict=True))
    return {"done": True, "num_tokens": len(named.selector.tokens), **counts}


def tier_of(cache: TieredRadixCache, storage: TieredStorage, name: str) -> Tier:
    """Return a tier by its name. Raises ``CallError`` where this server lacks it, or cannot tell
    what it holds."""
    if cache.pp_size > 1:
        raise CallError(STAGED)
    if name == Tier.OBJECT.value and not storage.has_object_tier:
        raise CallError(NO_OBJECT_TIER)
    return Tier(name)


def checkpoint(cache: TieredRadixCache, _: str, body: dict[str, Any]) -> Steps:
    """Make a conversation durable."""
    storage = store_of(cache)
    name = body.get("tier") or ("object" if storage.has_object_tier else "nvme")
    tier = tier_of(cache, storage, name)
    named = yield from prefix_of_body(cache, body)
    if named is None:
        return UNKNOWN
    return (yield from until_durable(cache, storage, named, tier, ended(True)))


def until_durable(
    cache: TieredRadixCache,
    storage: TieredStorage,
    named: Recent,
    tier: Tier,
    kept: Future[bool],
    **told: Any,
) -> Steps:
    """Make a prefix durable in a tier, and tell how far that is until its pin is ``kept`` too."""
    located = locate(cache, named.selector)
    _store_soon(cache, located.path)
    hashes, page_size = cache.page_hashes(located.key), int(cache.page_size)
    pages = hashes[: num_known(cache, storage, located, hashes)]
    begun = time.monotonic()
    offers_at = begun + _OFFER_AGAIN_S

    def work() -> int:
        left_s = begun + WORK_S - time.monotonic()
        return make_durable(storage, pages, tier, named.tenant, left_s)

    durable: Future[int] | None = None
    while True:
        store_of(cache)
        own = [0, 0]  # whether it is known, and how many are durable
        if durable is None:
            durable = None if is_storing(cache, located.path) else _workers.submit(work)
        elif has_ended(durable):
            own = [1, durable.result()]
        elif located.path and time.monotonic() >= offers_at:
            offers_at = time.monotonic() + _OFFER_AGAIN_S
            _offer_again(cache, located.path[-1].node_id)
        done, num_durable, is_settled, is_kept = yield [*own, *outcome([kept])]
        if is_settled and not is_kept:
            raise CallError(NOT_WRITTEN, 503)
        yield {
            "done": bool(done and is_settled),
            "tier": tier.value,
            "num_tokens": num_durable * page_size,
            "num_missing": (len(hashes) - num_durable) * page_size,
            **told,
        }


def _store_soon(cache: TieredRadixCache, path: Sequence[TreePathNodeInfo]) -> None:
    if cache.tiering is not None:
        cache.tiering.stores.store_soon(path)


def num_known(
    cache: TieredRadixCache, storage: TieredStorage, located: Located, hashes: Sequence[str]
) -> int:
    """Count the leading pages that memory or a tier holds; the others were never computed."""
    in_tree = located.path[-1].path_end // int(cache.page_size) if located.path else 0
    rest = sum(span.num_pages for span in storage.lookup_spans(hashes[in_tree:]))
    return min(len(hashes), in_tree + rest)


def _offer_again(cache: TieredRadixCache, last_node: int) -> None:
    """Offer stores again that admission dropped. Only where no other rank must do the same, since
    ranks differ in what was dropped."""
    if cache.decides_alone:
        # It may be evicted, or split at another place.
        with contextlib.suppress(KeyError):
            _store_soon(cache, cache.tree_core.collect_path_info([last_node])[0])


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


def key_of(cache: TieredRadixCache, selector: PrefixSelector) -> RadixKey:
    """Return the key of a prefix's whole pages, by which requests go now. Any thread."""
    return RadixKey(
        selector.tokens,
        extra_key=cache.hidden_tenants.key_of(selector.extra_key, selector.cache_salt),
        is_bigram=cache.tree_core.is_eagle,
        cache_salt=selector.cache_salt,
    ).page_aligned(cache.page_size)


def locate(cache: TieredRadixCache, selector: PrefixSelector) -> Located:
    """Return the whole pages of a prefix, and where the tree holds them."""
    key = key_of(cache, selector)
    if len(key) == 0:
        return Located(key, (), 0, 0)
    match = cache.match_visible(key)
    path = cache.tree_core.collect_path_info([match.best_match_node])[0]
    in_host = takewhile(lambda node: cache.tree_core.is_backuped(node.node_id), path)
    num_host_tokens = max((node.path_end for node in in_host), default=0)
    return Located(key, path, int(match.device_prefix_len), num_host_tokens)


def erasure_of(
    number: str, *, tenant: bytes | None = None, hashes: Iterable[str] | None = None
) -> Erasure:
    """Return what a call erases. Its id is the same on every rank, which a bucket or a peer would
    take for another server otherwise."""
    keys = None if hashes is None else unique_keys(map(bytes.fromhex, hashes))
    digest = hashlib.blake2b(number.encode(), digest_size=16, person=b"sgltiered-erase")
    digest.update(b"".join([tenant or b"", *(keys or ())]))
    return Erasure(keys, tenant, digest.digest())
