"""Pages that come back changed, grow, or are read as what they are not."""

from __future__ import annotations

import random
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard

from sglang_tiered.codecs import CODEC_NAMES, CodecError, PageCodec, PageLayout, make_codec
from sglang_tiered.codecs.encoded import HEADER_BYTES

LAYOUT = PageLayout.kv(dtype="bfloat16", num_layers=2, page_size=16, num_heads=2, head_dim=24)
CODECS = CODEC_NAMES[1:]


def keys_and_values(layout: PageLayout, seed: int) -> bytes:
    """Finite numbers of many sizes, as a page's bytes."""
    rng = np.random.default_rng(seed)
    num_elements = layout.page_bytes // layout.item_bytes
    values = rng.standard_normal(num_elements) * np.exp(rng.standard_normal(num_elements))
    if layout.dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(layout.dtype).tobytes()


def encode(codec: PageCodec, page: bytes) -> bytes:
    return b"".join(codec.encode((memoryview(page),)))


def decoded(codec: PageCodec, data: bytes, sizes: tuple[int, ...]) -> bytes:
    page = tuple(memoryview(bytearray(b"\xa5" * size)) for size in sizes)
    codec.decode(memoryview(data), page)
    return b"".join(page)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8"])
@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4, 5, 7, 64, 1001, 65536, 200_003])
def test_lossless_page_differs_by_a_byte(dtype: str, num_bytes: int) -> None:
    codec = make_codec("zstd", PageLayout.unknown(dtype))
    source = random.Random(num_bytes)
    for data in (source.randbytes(num_bytes), bytes(num_bytes), b"\x3f\x80" * num_bytes):
        page = data[:num_bytes]
        encoded = encode(codec, page)
        assert decoded(codec, encoded, (num_bytes,)) == page
        assert len(encoded) <= num_bytes + HEADER_BYTES


def test_keys_and_values_do_not_shrink() -> None:
    page = keys_and_values(LAYOUT, 1)
    encoded = encode(make_codec("zstd", LAYOUT), page)
    assert len(encoded) < 0.9 * len(page)
    zeros = encode(make_codec("zstd", LAYOUT), bytes(1 << 20))
    assert len(zeros) < 1000


@pytest.mark.parametrize("name", CODECS)
def test_truncated_or_lengthened_page_decodes(name: str) -> None:
    codec = make_codec(name, LAYOUT)
    encoded = encode(codec, keys_and_values(LAYOUT, 3))
    ends = [*range(40), *range(40, len(encoded), 97), len(encoded) - 1]
    for end in ends:
        with pytest.raises(CodecError):
            decoded(codec, encoded[:end], (LAYOUT.page_bytes,))
    with pytest.raises(CodecError):
        decoded(codec, encoded + b"\0", (LAYOUT.page_bytes,))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("place", range(HEADER_BYTES))
def test_header_byte_is_not_looked_at(name: str, place: int) -> None:
    codec = make_codec(name, LAYOUT)
    encoded = bytearray(encode(codec, keys_and_values(LAYOUT, 4)))
    encoded[place] ^= 0x40
    with pytest.raises(CodecError):
        decoded(codec, bytes(encoded), (LAYOUT.page_bytes,))


@pytest.mark.parametrize("name", CODECS)
def test_page_of_another_layout_decodes(name: str) -> None:
    """Of the same length: K and V of one layer and four heads instead of two and two."""
    other = PageLayout.kv(dtype="bfloat16", num_layers=1, page_size=16, num_heads=4, head_dim=24)
    assert other.page_bytes == LAYOUT.page_bytes
    encoded = encode(make_codec(name, LAYOUT), keys_and_values(LAYOUT, 5))
    with pytest.raises(CodecError):
        decoded(make_codec(name, other), encoded, (LAYOUT.page_bytes,))


def test_page_of_another_codec_decodes() -> None:
    page = (memoryview(keys_and_values(LAYOUT, 6)),)
    for name in CODECS:
        for other in CODECS:
            if other not in {name, "zstd"}:  # what a lossy codec cannot express is zstd's
                with pytest.raises(CodecError):
                    decoded(
                        make_codec(name, LAYOUT),
                        b"".join(make_codec(other, LAYOUT).encode(page)),
                        (LAYOUT.page_bytes,),
                    )


@pytest.mark.parametrize("name", CODECS)
def test_page_decodes_into_another_length(name: str) -> None:
    codec = make_codec(name, LAYOUT)
    encoded = encode(codec, keys_and_values(LAYOUT, 7))
    for size in (1, LAYOUT.page_bytes - 2, LAYOUT.page_bytes + 2):
        with pytest.raises(CodecError):
            decoded(codec, encoded, (size,))


def test_chunk_that_claims_petabytes_takes_them() -> None:
    codec = make_codec("zstd", LAYOUT)
    encoded = encode(codec, keys_and_values(LAYOUT, 8))
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    size = zstandard.frame_content_size(frame)
    place = bytes(frame).index(struct.pack("<I", size))
    frame[place : place + 4] = struct.pack("<I", 0xFFFF_FFF0)
    assert zstandard.frame_content_size(frame) == 0xFFFF_FFF0
    bomb = encoded[:HEADER_BYTES] + struct.pack("<I", len(frame) | 1 << 31) + bytes(frame)
    with pytest.raises(CodecError, match="expands to"):
        decoded(codec, bomb, (LAYOUT.page_bytes,))


@pytest.mark.parametrize("name", CODECS)
def test_threads_share_a_compressor(name: str) -> None:
    layout = PageLayout.kv(dtype="float32", num_layers=4, page_size=64, num_heads=2, head_dim=64)
    codec = make_codec(name, layout)
    pages = [keys_and_values(layout, seed) for seed in range(4)]
    expected = [encode(codec, page) for page in pages]
    exact = [decoded(codec, data, (layout.page_bytes,)) for data in expected]
    start = threading.Barrier(4)

    def work(index: int) -> None:
        start.wait(timeout=30)
        for _ in range(8):
            data = encode(codec, pages[index])
            assert data == expected[index]
            assert decoded(codec, data, (layout.page_bytes,)) == exact[index]

    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(work, range(4), timeout=60):
            pass
