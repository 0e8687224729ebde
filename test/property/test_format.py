"""Every structure survives a round trip, and no flipped byte goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tiered.storage.region import format as form
from sglang_tiered.storage.region.format import BLOCK_BYTES, Contents, Extent, RegionHeader

u64 = st.integers(0, 2**64 - 1)
nonces = st.binary(min_size=16, max_size=16)
digests = st.binary(min_size=32, max_size=32)
blocks = st.integers(8, 2**28).map(lambda count: count * BLOCK_BYTES)
pages = st.tuples(digests, st.integers(1, 2**32 - 1), u64)
extents = st.builds(
    Extent,
    st.integers(1, 2**28 - 1).map(lambda count: count * BLOCK_BYTES),
    digests,
    st.lists(pages, min_size=1, max_size=form.MAX_EXTENT_PAGES).map(form.page_table),
)
headers = st.builds(RegionHeader, blocks, u64, nonces, u64)


@given(headers)
def test_region_header_round_trip(header: RegionHeader) -> None:
    block = form.pack_region_header(header)
    assert len(block) == BLOCK_BYTES
    assert form.unpack_region_header(block) == header
    assert form.other_version(block) is None


@given(extents, nonces, st.integers(0, 2**32 - 1))
def test_extent_header_round_trip(extent: Extent, nonce: bytes, ordinal: int) -> None:
    header = form.pack_extent_header(extent, nonce, ordinal)
    assert len(header) == form.extent_header_bytes(len(extent.pages))
    assert form.peek_extent_header_bytes(header[:BLOCK_BYTES]) == len(header)
    found = form.unpack_extent_header(header, extent.offset, nonce, ordinal)
    assert found is not None
    assert found[:2] == extent[:2]
    assert np.array_equal(found.pages, extent.pages)
    assert form.unpack_extent_header(header, extent.offset, nonce, ordinal ^ 1) is None
    other = bytes([nonce[0] ^ 1]) + nonce[1:]
    assert form.unpack_extent_header(header, extent.offset, other, ordinal) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(extents, max_size=5), nonces)
def test_footer_round_trip(written: list[Extent], nonce: bytes) -> None:
    contents = Contents.of(written)
    footer = form.pack_footer(contents, nonce)
    assert len(footer) == form.footer_bytes(len(written), sum(len(e.pages) for e in written))
    found = form.unpack_footer(footer, nonce)
    assert found is not None
    assert np.array_equal(found.extents, contents.extents)
    assert np.array_equal(found.pages, contents.pages)
    assert form.unpack_footer(footer, bytes(15) + bytes([nonce[15] ^ 1])) is None


@given(nonces, st.integers(0, 2**32 - 1), st.integers(1, 2**20), st.integers(1, 2**20))
def test_trailer_round_trip(nonce: bytes, num_extents: int, offset: int, size: int) -> None:
    trailer = num_extents, offset * BLOCK_BYTES, size * BLOCK_BYTES
    region_bytes = (offset + size + 1) * BLOCK_BYTES
    block = form.pack_trailer(nonce, *trailer)
    assert form.unpack_trailer(block, nonce, region_bytes) == trailer
    assert form.unpack_trailer(block, nonce, region_bytes + BLOCK_BYTES) is None


def flips(data: bytes) -> list[bytes]:
    """The data with one bit flipped, for every byte."""
    flipped = []
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        flipped.append(bytes(changed))
    return flipped


EXTENT = Extent(BLOCK_BYTES, b"n" * 32, form.page_table([(b"k" * 32, 5000, 7), (b"l" * 32, 1, 8)]))
NONCE = bytes(range(16))


STRUCTURES: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "region header": (
        form.pack_region_header(RegionHeader(8 * BLOCK_BYTES, 3, NONCE, 1)),
        lambda data: form.unpack_region_header(data) or form.other_version(data),
    ),
    "extent header": (
        form.pack_extent_header(EXTENT, NONCE, 0),
        lambda data: form.unpack_extent_header(data, EXTENT.offset, NONCE, 0),
    ),
    "footer": (
        form.pack_footer(Contents.of([EXTENT]), NONCE),
        lambda data: form.unpack_footer(data, NONCE),
    ),
    "trailer": (
        form.pack_trailer(NONCE, 1, 6 * BLOCK_BYTES, BLOCK_BYTES),
        lambda data: form.unpack_trailer(data, NONCE, 8 * BLOCK_BYTES),
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_flipped_byte_is_seen(name: str) -> None:
    """As damage: not as a newer format either."""
    good, unpack = STRUCTURES[name]
    assert unpack(good)
    assert not any(map(unpack, flips(good)))


def test_a_forged_size_is_not_followed() -> None:
    huge = form.pack_region_header(RegionHeader(2**64 - BLOCK_BYTES, 3, NONCE, 1))
    assert form.unpack_region_header(huge) is None
    empty_footer = form.pack_trailer(NONCE, 0, 7 * BLOCK_BYTES, 0)
    assert form.unpack_trailer(empty_footer, NONCE, 8 * BLOCK_BYTES) is None
    no_pages = Extent(BLOCK_BYTES, b"n" * 32, form.page_table([]))
    assert form.unpack_footer(form.pack_footer(Contents.of([no_pages]), NONCE), NONCE) is None
    odd = Extent(BLOCK_BYTES + 1, b"n" * 32, EXTENT.pages)
    assert form.unpack_footer(form.pack_footer(Contents.of([odd]), NONCE), NONCE) is None
