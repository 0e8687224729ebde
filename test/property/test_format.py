"""Every structure survives a round trip, and no flipped byte goes unnoticed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    MAX_EXTENT_PAGES,
    CheckpointEntry,
    Contents,
    Extent,
    RegionHeader,
    Trailer,
    extent_header_bytes,
    footer_bytes,
    other_version,
    pack_checkpoint,
    pack_extent_header,
    pack_footer,
    pack_region_header,
    pack_trailer,
    page_table,
    peek_extent_header_bytes,
    unpack_checkpoint,
    unpack_extent_header,
    unpack_footer,
    unpack_region_header,
    unpack_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

u64 = st.integers(0, 2**64 - 1)
nonces = st.binary(min_size=16, max_size=16)
digests = st.binary(min_size=32, max_size=32)
blocks = st.integers(8, 2**28).map(lambda count: count * BLOCK_BYTES)
pages = st.tuples(digests, st.integers(1, 2**32 - 1), u64)
extents = st.builds(
    Extent,
    st.integers(1, 2**28 - 1).map(lambda count: count * BLOCK_BYTES),
    digests,
    st.lists(pages, min_size=1, max_size=MAX_EXTENT_PAGES).map(page_table),
)
headers = st.builds(RegionHeader, blocks, u64, nonces, u64)


@given(headers)
def test_region_header_round_trip(header: RegionHeader) -> None:
    block = pack_region_header(header)
    assert len(block) == BLOCK_BYTES
    assert unpack_region_header(block) == header
    assert other_version(block) is None


@given(extents, nonces, st.integers(0, 2**32 - 1))
def test_extent_header_round_trip(extent: Extent, nonce: bytes, ordinal: int) -> None:
    header = pack_extent_header(extent, nonce, ordinal)
    assert len(header) == extent_header_bytes(len(extent.pages))
    assert peek_extent_header_bytes(header[:BLOCK_BYTES]) == len(header)
    found = unpack_extent_header(header, extent.offset, nonce, ordinal)
    assert found is not None
    assert found[:2] == extent[:2]
    assert np.array_equal(found.pages, extent.pages)
    assert unpack_extent_header(header, extent.offset, nonce, ordinal ^ 1) is None
    other = bytes([nonce[0] ^ 1]) + nonce[1:]
    assert unpack_extent_header(header, extent.offset, other, ordinal) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(extents, max_size=5), nonces)
def test_footer_round_trip(written: list[Extent], nonce: bytes) -> None:
    contents = Contents.of(written)
    footer = pack_footer(contents, nonce)
    assert len(footer) == footer_bytes(len(written), sum(len(e.pages) for e in written))
    found = unpack_footer(footer, nonce)
    assert found is not None
    assert np.array_equal(found.extents, contents.extents)
    assert np.array_equal(found.pages, contents.pages)
    assert unpack_footer(footer, bytes(15) + bytes([nonce[15] ^ 1])) is None


@given(nonces, st.integers(0, 2**32 - 1), st.integers(1, 2**20), st.integers(1, 2**20))
def test_trailer_round_trip(nonce: bytes, num_extents: int, offset: int, size: int) -> None:
    trailer = Trailer(nonce, num_extents, offset * BLOCK_BYTES, size * BLOCK_BYTES)
    region_bytes = (offset + size + 1) * BLOCK_BYTES
    block = pack_trailer(trailer)
    assert unpack_trailer(block, nonce, region_bytes) == trailer
    assert unpack_trailer(block, nonce, region_bytes + BLOCK_BYTES) is None


def flips(data: bytes) -> list[bytes]:
    """The data with one bit flipped, for every byte."""
    flipped = []
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        flipped.append(bytes(changed))
    return flipped


EXTENT = Extent(BLOCK_BYTES, b"n" * 32, page_table([(b"k" * 32, 5000, 7), (b"l" * 32, 1, 8)]))
NONCE = bytes(range(16))


STRUCTURES: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "region header": (
        pack_region_header(RegionHeader(8 * BLOCK_BYTES, 3, NONCE, 1)),
        lambda data: unpack_region_header(data) or other_version(data),
    ),
    "extent header": (
        pack_extent_header(EXTENT, NONCE, 0),
        lambda data: unpack_extent_header(data, EXTENT.offset, NONCE, 0),
    ),
    "footer": (pack_footer(Contents.of([EXTENT]), NONCE), lambda data: unpack_footer(data, NONCE)),
    "trailer": (
        pack_trailer(Trailer(NONCE, 1, 6 * BLOCK_BYTES, BLOCK_BYTES)),
        lambda data: unpack_trailer(data, NONCE, 8 * BLOCK_BYTES),
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_flipped_byte_is_seen(name: str) -> None:
    """As damage: not as a newer format either."""
    good, unpack = STRUCTURES[name]
    assert unpack(good)
    assert not any(map(unpack, flips(good)))


def test_a_checkpoint_counts_only_whole() -> None:
    entries = [CheckpointEntry(7, NONCE, 2 * BLOCK_BYTES), CheckpointEntry(9, b"n" * 16, 0)]
    good = pack_checkpoint(entries)
    assert unpack_checkpoint(good) == entries
    assert unpack_checkpoint(pack_checkpoint([])) == []
    cut = [good[:length] for length in range(len(good))]
    between_blocks = pack_checkpoint([CheckpointEntry(7, NONCE, 2 * BLOCK_BYTES - 1)])
    for bad in (*flips(good), *cut, good + b"\0", between_blocks):
        assert unpack_checkpoint(bad) is None


def test_a_forged_size_is_not_followed() -> None:
    huge = pack_region_header(RegionHeader(2**64 - BLOCK_BYTES, 3, NONCE, 1))
    assert unpack_region_header(huge) is None
    empty_footer = pack_trailer(Trailer(NONCE, 0, 7 * BLOCK_BYTES, 0))
    assert unpack_trailer(empty_footer, NONCE, 8 * BLOCK_BYTES) is None
    no_pages = Extent(BLOCK_BYTES, b"n" * 32, page_table([]))
    assert unpack_footer(pack_footer(Contents.of([no_pages]), NONCE), NONCE) is None
    odd = Extent(BLOCK_BYTES + 1, b"n" * 32, EXTENT.pages)
    assert unpack_footer(pack_footer(Contents.of([odd]), NONCE), NONCE) is None
