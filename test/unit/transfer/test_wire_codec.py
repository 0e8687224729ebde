"""Wire codecs: what comes back, how far off it is, and what no sender makes is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_pair import Pool, Shape

from sglang_tiered.codecs.dtypes import float32_to_bytes, to_float32
from sglang_tiered.errors import TransferError
from sglang_tiered.transfer.layout import Pair, pair_buffers
from sglang_tiered.transfer.messages import KVLayout
from sglang_tiered.transfer.wire_codec import CODECS, WireCodec, make_codec

PAGE_SIZE, NUM_PAGES, CHANNELS = 16, 16, 48
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def layout(codec: str, element: str, page_size: int = PAGE_SIZE) -> KVLayout:
    return KVLayout(page_size, "auto", [64], [0], 0, 1, 1, [], [], element, codec)


def codec_of(codec: str, element: str, page_size: int = PAGE_SIZE) -> WireCodec:
    made = make_codec(layout(codec, element, page_size))
    assert made is not None
    return made


def pairs_of(element: str, count: int = 2) -> list[Pair]:
    page_bytes = PAGE_SIZE * CHANNELS * ITEM_BYTES[element]
    return [Pair(index, index, page_bytes) for index in range(count)]


def keys_and_values(element: str, seed: int = 0) -> Any:
    """[pair, token, channel] with a level of its own per channel, as keys have."""
    source = np.random.default_rng(seed)
    shape = (2, NUM_PAGES * PAGE_SIZE, CHANNELS)
    levels = source.normal(0, 20, (2, 1, CHANNELS))
    values = (levels + source.normal(0, 1, shape)).astype(np.float32)
    return float32_to_bytes(values, element)


@pytest.mark.parametrize("element", ITEM_BYTES)
def test_int8_errs_by_less_than_a_channels_step(element: str) -> None:
    plain, codec, pairs = keys_and_values(element), codec_of("int8", element), pairs_of(element)
    encoded = codec.encode(plain, pairs, NUM_PAGES)
    assert encoded is not None
    assert encoded.nbytes <= plain.nbytes * (0.3 if element == "float32" else 0.55)
    got = codec.decode(encoded, pairs, NUM_PAGES)
    assert got.nbytes == plain.nbytes
    before = to_float32(plain, element).reshape(2, -1, CHANNELS).astype(np.float64)
    after = to_float32(got, element).reshape(2, -1, CHANNELS).astype(np.float64)
    half_step = (before.max(axis=1) - before.min(axis=1)) / 510
    ulp = {"float32": 2**-22, "float16": 2**-11, "bfloat16": 2**-8}[element]
    rounding = np.abs(before).max() * ulp
    assert np.all(np.abs(after - before) <= half_step[:, None] + rounding)
    assert not np.array_equal(after, before)


@pytest.mark.parametrize("element", ITEM_BYTES)
def test_zstd_brings_back_every_bit(element: str) -> None:
    plain, codec, pairs = keys_and_values(element), codec_of("zstd", element), pairs_of(element)
    encoded = codec.encode(plain, pairs, NUM_PAGES)
    assert encoded is not None and encoded.nbytes < 0.97 * plain.nbytes
    assert codec.decode(encoded, pairs, NUM_PAGES).tobytes() == plain.tobytes()


def test_a_constant_channel_comes_back_exactly() -> None:
    """Its range is nothing, and must not be divided by."""
    values = np.full((2, NUM_PAGES * PAGE_SIZE, CHANNELS), 3.25, np.float32)
    plain = float32_to_bytes(values, "float16")
    codec, pairs = codec_of("int8", "float16"), pairs_of("float16")
    encoded = codec.encode(plain, pairs, NUM_PAGES)
    assert encoded is not None
    assert codec.decode(encoded, pairs, NUM_PAGES).tobytes() == plain.tobytes()


@pytest.mark.parametrize("pair", [(np.nan, 0), (np.inf, 0), (-np.inf, 0), (3e38, -3e38)])
def test_numbers_beyond_int8_are_sent_plain(pair: tuple[float, float]) -> None:
    values = np.zeros((2, NUM_PAGES * PAGE_SIZE, CHANNELS), np.float32)
    values[1, 7:9, 5] = pair
    plain = float32_to_bytes(values, "float32")
    assert codec_of("int8", "float32").encode(plain, pairs_of("float32"), NUM_PAGES) is None


def test_tiny_ranges_decode_to_their_least_value() -> None:
    values = np.zeros((1, PAGE_SIZE * 16, CHANNELS), np.float32)
    values[0, 1] = 1e-44
    codec, pairs = codec_of("int8", "float32"), pairs_of("float32", 1)
    encoded = codec.encode(float32_to_bytes(values, "float32"), pairs, 16)
    assert encoded is not None
    assert not codec.decode(encoded, pairs, 16).view(np.float32).any()


def test_incompressible_slabs_are_sent_plain() -> None:
    noise = np.frombuffer(np.random.default_rng(1).bytes(2 * NUM_PAGES * PAGE_SIZE * 96), np.uint8)
    assert codec_of("zstd", "bfloat16").encode(noise, pairs_of("bfloat16"), NUM_PAGES) is None
    one_token = [Pair(0, 0, CHANNELS * 2)]
    plain = float32_to_bytes(np.ones((1, CHANNELS), np.float32), "bfloat16")
    assert codec_of("int8", "bfloat16", page_size=1).encode(plain, one_token, 1) is None


@pytest.mark.parametrize("name", ["int8", "zstd"])
@given(data=st.binary(max_size=600))
@settings(max_examples=60, deadline=None)
def test_bytes_of_no_sender_are_refused(name: str, data: bytes) -> None:
    codec, pairs = codec_of(name, "bfloat16"), pairs_of("bfloat16", 1)
    with pytest.raises(TransferError):
        codec.decode(np.frombuffer(data, np.uint8), pairs, 1)


def test_decompression_bomb_is_refused_unpacked() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    bomb = (len(frame) | 1 << 31).to_bytes(4, "little") + frame
    assert len(bomb) < 2000
    codec, pairs = codec_of("zstd", "bfloat16"), pairs_of("bfloat16", 1)
    with pytest.raises(TransferError, match="16777216"):
        codec.decode(np.frombuffer(bomb, np.uint8), pairs, 1)


def test_partial_elements_are_not_encoded() -> None:
    odd = [Pair(0, 0, PAGE_SIZE * 3)]
    codec = codec_of("int8", "bfloat16")
    assert codec.encode(np.zeros(PAGE_SIZE * 3, np.uint8), odd, 1) is None
    with pytest.raises(TransferError, match="whole elements"):
        codec.decode(np.zeros(10, np.uint8), odd, 1)


def test_codec_for_an_unknown_dtype_is_refused() -> None:
    assert make_codec(layout("none", "")) is None
    with pytest.raises(TransferError, match="--transfer-codec int8"):
        make_codec(layout("int8", ""))
    with pytest.raises(TransferError, match="--transfer-codec gzip"):
        make_codec(layout("gzip", "bfloat16"))
    assert CODECS[0] == "none"


def test_different_codecs_on_both_sides_are_refused() -> None:
    ours = msgspec.structs.replace(Pool(Shape()).layout, element="bfloat16", codec="int8")
    for other, flag in (
        ({"codec": "none"}, "--transfer-codec"),
        ({"element": "float16"}, "--dtype"),
    ):
        with pytest.raises(TransferError, match=flag):
            pair_buffers(ours, msgspec.structs.replace(ours, **other))
    assert pair_buffers(ours, ours)
