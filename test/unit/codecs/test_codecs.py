"""Pages that come back changed, grow, or are read as what they are not."""

from __future__ import annotations

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


def test_keys_and_values_do_not_shrink() -> None:
    page = keys_and_values(LAYOUT, 1)
    encoded = encode(make_codec("zstd", LAYOUT), page)
    assert len(encoded) < 0.9 * len(page)
    zeros = encode(make_codec("zstd", LAYOUT), bytes(1 << 20))
    assert len(zeros) < 1000


@pytest.mark.parametrize("name", CODECS)
def test_what_was_not_encoded_so_decodes(name: str) -> None:
    """Cut, lengthened or with another header; by another codec, or of another layout of the same
    length; or into another length."""
    codec, size = make_codec(name, LAYOUT), LAYOUT.page_bytes
    page = keys_and_values(LAYOUT, 3)
    encoded = encode(codec, page)
    other = PageLayout.kv(dtype="bfloat16", num_layers=1, page_size=16, num_heads=4, head_dim=24)
    assert other.page_bytes == size
    wrong = [encode(make_codec(name, other), page), encoded + b"\0", encoded[:-1]]
    wrong += [encoded[:end] for end in (*range(40), *range(40, len(encoded), 97))]
    for at in range(HEADER_BYTES):
        wrong.append(encoded[:at] + bytes([encoded[at] ^ 0x40]) + encoded[at + 1 :])
    for another in CODECS:
        if another not in {name, "zstd"}:  # what a lossy codec cannot express is zstd's
            wrong.append(encode(make_codec(another, LAYOUT), page))
    cases = [(data, size) for data in wrong]
    for length in (1, size - 2, size + 2):
        said = encoded[:8] + struct.pack("<I", length) + encoded[HEADER_BYTES:]
        cases += [(encoded, length), (said, length)]
    for data, length in cases:
        with pytest.raises(CodecError):
            decoded(codec, data, (length,))


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


KEYS = [[1, -2, 0.5, 3], [1.5, 2, -0.25, 448]]
VALUES = [[0, 1, 2, 3], [4, 5, 6, 7]]
ENCODED = {
    # raw: nothing to gain; keys; values
    "zstd": """
        c5 01 00 02 46 e6 bf 41 20 00 00 00
        80 3f 00 c0 00 3f 40 40 c0 3f 00 40 80 be e0 43
        00 00 80 3f 00 40 40 40 80 40 a0 40 c0 40 e0 40
    """,
    # scales 2**0 and 2**-6; 38 is 1, 7e is 448
    "fp8": """
        c5 01 02 02 46 e6 bf 41 20 00 00 00
        02 00 00 00 80 7a
        10 00 00 00 38 c0 30 44 3c 40 a8 7e 00 68 70 74 78 7a 7c 7e
    """,
    # from -2 by 1.7656; from 0 by 0.02747
    "int8": """
        c5 01 03 02 46 e6 bf 41 20 00 00 00
        08 00 00 00 00 c0 e2 3f 00 00 e1 3c
        10 00 00 00 02 00 01 03 02 02 01 ff 00 24 49 6d 92 b6 da ff
    """,
}


@pytest.mark.parametrize("name", CODECS)
def test_worked_example_differs_from_encoded_bytes(name: str) -> None:
    """Those of version 1 of the format. With four channels a head is one group, and with two tokens
    ``int8`` too shares one scale among them."""
    layout = PageLayout.kv(dtype="bfloat16", num_layers=1, page_size=2, num_heads=1, head_dim=4)
    bits = np.array(KEYS + VALUES, np.float32).view(np.uint32) >> 16
    page = bits.astype(np.uint16).tobytes()
    assert encode(make_codec(name, layout), page).hex(" ") == " ".join(ENCODED[name].split()), name
