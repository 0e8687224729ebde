"""Any bytes decode to ``CodecError`` or into the page's own memory, never beside it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tiered.codecs import CODEC_NAMES, LOSSY_CODEC_NAMES, CodecError, PageLayout, make_codec
from sglang_tiered.codecs.encoded import HEADER_BYTES

LAYOUT = PageLayout.kv(dtype="float16", num_layers=2, page_size=4, num_heads=2, head_dim=8)
CODECS = {name: make_codec(name, LAYOUT) for name in CODEC_NAMES[1:]}
CODECS |= {dtype: make_codec("zstd", PageLayout.unknown(dtype)) for dtype in ("float32", "uint8")}
GUARD = b"\xa5" * 16

names = st.sampled_from(sorted(CODECS))
pages = st.binary(min_size=LAYOUT.page_bytes, max_size=LAYOUT.page_bytes)
repeated = st.binary(min_size=1, max_size=9).map(lambda part: part * 97)  # it shrinks


def decode_guarded(name: str, data: bytes, num_bytes: int, cut: int) -> bytes | None:
    """The decoded page, or None. Fails when a byte beside the segments changed."""
    memory = bytearray(GUARD + bytes(cut) + GUARD + bytes(num_bytes - cut) + GUARD)
    first = memoryview(memory)[16 : 16 + cut]
    second = memoryview(memory)[32 + cut : 32 + num_bytes]
    try:
        CODECS[name].decode(memoryview(data), (first, second))
    except CodecError:
        page = None
    else:
        page = bytes(first) + bytes(second)
    assert memory[:16] == memory[16 + cut : 32 + cut] == memory[-16:] == GUARD
    return page


@given(name=names, data=st.binary(max_size=400))
@settings(max_examples=150, deadline=None)
def test_garbage_decodes(name: str, data: bytes) -> None:
    assert decode_guarded(name, data, LAYOUT.page_bytes, 100) is None


@given(name=names, page=pages, mutations=st.lists(st.tuples(st.integers(0), st.integers(1, 255))))
@settings(max_examples=200, deadline=None)
def test_damaged_page_writes_beside_its_segments(
    name: str, page: bytes, mutations: list[tuple[int, int]]
) -> None:
    encoded = bytearray(b"".join(CODECS[name].encode((memoryview(page),))))
    for place, flip in mutations:
        encoded[place % len(encoded)] ^= flip
    decode_guarded(name, bytes(encoded), LAYOUT.page_bytes, 37)


@given(
    name=names, page=st.binary(min_size=1, max_size=700) | pages | repeated, cut=st.integers(0, 700)
)
@settings(max_examples=150, deadline=None)
def test_any_bytes_of_any_length_come_back(name: str, page: bytes, cut: int) -> None:
    """Exactly, unless a lossy codec reads the page; then a second time the same, but by int8."""
    codec = CODECS[name]
    cut = min(cut, len(page))
    data = b"".join(codec.encode((memoryview(page[:cut]), memoryview(page[cut:]))))
    assert len(data) <= len(page) + HEADER_BYTES
    back = decode_guarded(name, bytes(data), len(page), cut)
    assert back is not None
    if codec.name not in LOSSY_CODEC_NAMES or len(page) != LAYOUT.page_bytes:
        assert back == page
    if name != "int8":
        again = b"".join(codec.encode((memoryview(back),)))
        assert decode_guarded(name, again, len(page), cut) == back
