"""Slabs that a codec encodes: what comes back, and what no sender makes is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from transfer_pair import Pool, Shape, indices

from sglang_tiered.codecs.base import float32_to_bytes, to_float32
from sglang_tiered.codecs.encoded import copied
from sglang_tiered.errors import TransferError
from sglang_tiered.transfer.layout import pair_buffers, slab_codec, whole_pieces
from sglang_tiered.transfer.messages import ENCODED, KV_COMPONENT, KVLayout, Slab
from sglang_tiered.transfer.rooms import ReceiveRoom

SHAPE = Shape(page_size=16, num_pages=4)
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def layout_of(pool: Pool, codec: str, element: str = "bfloat16") -> KVLayout:
    return msgspec.structs.replace(pool.layout, codec=codec, element=element)


def filled(element: str) -> Pool:
    """Keys and values: a level of its own per channel."""
    pool, source = Pool(SHAPE), np.random.default_rng(0)
    channels = pool.kv.shape[-1] // ITEM_BYTES[element]
    shape = (*pool.kv.shape[:-1], channels)
    values = source.normal(0, 20, channels) + source.normal(0, 1, shape)
    pool.kv.reshape(-1)[:] = float32_to_bytes(values.astype(np.float32), element)
    return pool


def landed(pool: Pool, payload: Any, layout: KVLayout) -> Pool:
    """All pages of all buffers of ``pool``, encoded as ``payload``, in another pool."""
    target, pages = Pool(SHAPE), indices(range(SHAPE.num_pages))
    pairs, memories = pair_buffers(pool.layout, target.layout), target.memories
    room = ReceiveRoom(1, 1, memories, memories.kv, pages, [], None)
    digest = xxhash.xxh3_64_intdigest(payload)
    slab = Slab(1, 1, 0, KV_COMPONENT, 0, len(pairs), 0, len(pages), ENCODED, digest)
    assert room.land(slab, payload, pairs, layout)
    return target


def encoded(pool: Pool, layout: KVLayout) -> Any:
    codec = slab_codec(layout, whole_pieces(pool.memories.kv.buffers), SHAPE.num_pages)
    assert codec is not None
    return copied(codec.encode((pool.kv.reshape(-1).data,)))


@pytest.mark.parametrize("codec", ["zstd", "int8"])
@pytest.mark.parametrize("element", ITEM_BYTES)
def test_slab_comes_back_as_its_codec_says(element: str, codec: str) -> None:
    """A channel's step is that of its tokens in one buffer."""
    pool = filled(element)
    layout = layout_of(pool, codec, element)
    got = landed(pool, encoded(pool, layout), layout)
    if codec == "zstd":
        assert np.array_equal(got.kv, pool.kv)
        return
    tokens = SHAPE.num_pages * SHAPE.page_size
    before, after = (
        to_float32(one.kv.reshape(-1), element).reshape(len(pool.kv), tokens, -1)
        for one in (pool, got)
    )
    step = (before.max(axis=1) - before.min(axis=1)) / 255
    assert np.all(np.abs(after - before) <= 0.6 * step[:, None] + np.abs(before).max() / 256)
    assert not np.array_equal(after, before)


def test_partial_elements_are_encoded_exactly() -> None:
    pool = filled("bfloat16")
    layout = msgspec.structs.replace(layout_of(pool, "int8", "float32"), page_size=24)
    assert np.array_equal(landed(pool, encoded(pool, layout), layout).kv, pool.kv)


@pytest.mark.parametrize("data", [b"", b"x" * 40, b"\xc5\1\1\2" + bytes(60)], ids=len)
def test_bytes_that_no_codec_made_are_refused(data: bytes) -> None:
    pool = filled("bfloat16")
    for codec, why in (("int8", "no codec made"), ("none", "takes as it is")):
        with pytest.raises(TransferError, match=why):
            landed(pool, data, layout_of(pool, codec))
