"""What a picker reads of events: where they are, and by which keys pages go in them."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from sglang.srt.disaggregation.kv_events import kv_event_namespace_seed, namespaced_block_hash
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import (
    compute_node_event_hash_values,
    get_storage_hash_str,
    hash_str_to_int64,
)

from sglang_tiered.integration.observe.kv_events import _Node
from sglang_tiered.route.prompt import Prompt, page_keys
from sglang_tiered.route.replicas import HeldPages
from sglang_tiered.sharing.mirror import fingerprints_of


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([0.0, [{"type": "X"}]])])
def test_batch_of_another_kind_is_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        HeldPages().apply(payload)


PAGE = 16
IDS = [(7 * number * number + 3) % 50_000 for number in range(5 * PAGE + 3)]


@pytest.mark.parametrize("extra_key", [None, "", "tenant-a", "ü"])
@pytest.mark.parametrize("cache_salt", [None, "", "salt"])
def test_keys_are_the_hashes_of_sglangs_events(
    extra_key: str | None, cache_salt: str | None
) -> None:
    key = RadixKey(IDS[: 5 * PAGE], extra_key=extra_key, cache_salt=cache_salt)
    root = _Node(RadixKey([]), None, [])
    node: Any = _Node(key, root, None)  # type: ignore[arg-type]
    if extra_key is None and cache_salt is None:
        node.hash_value = None
    hashes = compute_node_event_hash_values(node, PAGE)
    seed = kv_event_namespace_seed(extra_key=key.extra_key, cache_salt=key.cache_salt)
    told = [namespaced_block_hash(hash_str_to_int64(one), namespace_seed=seed) for one in hashes]
    assert page_keys(array("I", IDS), PAGE, extra_key, cache_salt) == told
    assert len(told) == 5
    names = get_storage_hash_str(key, page_size=PAGE)
    prompt = Prompt(len(IDS), array("I", IDS), extra_key, cache_salt)
    assert prompt.stored(PAGE).tolist() == fingerprints_of(list(map(bytes.fromhex, names))).tolist()
