"""Sizes, names and checksums of the format; and the worked example beside this file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sglang_tiered.checksummed import page_checksum
from sglang_tiered.storage.region import format as form
from sglang_tiered.storage.region.format import BLOCK_BYTES, Contents, Extent


def test_sizes_are_what_the_grammar_says() -> None:
    assert (form.extent_header_bytes(90), form.extent_header_bytes(91)) == (
        BLOCK_BYTES,
        2 * BLOCK_BYTES,
    )
    assert form.MAX_EXTENT_HEADER_BYTES == 6 * BLOCK_BYTES
    region_bytes = 16 * BLOCK_BYTES
    largest = extent_of(BLOCK_BYTES, b"n" * 32, (form.max_page_bytes(region_bytes),))
    assert largest.end + form.footer_bytes(1, 1) + BLOCK_BYTES == region_bytes
    for page_bytes in (32 << 20, (32 << 20) + 1, (63 << 20) - 5):
        region_bytes = form.min_region_bytes(page_bytes)
        assert region_bytes % BLOCK_BYTES == 0
        assert page_bytes <= form.max_page_bytes(region_bytes) < page_bytes + BLOCK_BYTES
    extents = [extent_of(BLOCK_BYTES, b"n" * 32, (1, 4097))]
    extents.append(extent_of(1 << 16, b"m" * 32, (1,) * 91))  # a header of two blocks
    placed = [offset for extent in extents for offset in extent.page_offsets().tolist()]
    assert Contents.of(extents).page_offsets().tolist() == placed


def extent_of(offset: int, namespace: bytes, lengths: tuple[int, ...]) -> Extent:
    return Extent(offset, namespace, form.page_table((b"k" * 32, length, 0) for length in lengths))


NAMES = "region-1.kv region-000000000000000G.kv region-000000000000000A.kv"
OTHERS = "region-0000000000000000.kv.bak xregion-0000000000000000.kv region-ffffffffffffffff.kv"


@pytest.mark.parametrize("name", [*NAMES.split(), *OTHERS.split(), "region-0000000000000000.kv\n"])
def test_other_names_are_not_ours(name: str) -> None:
    assert form.parse_region_name(name) is None


def test_another_version_is_told_from_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "FORMAT_VERSION", 5)
    block = form.pack_region_header(form.RegionHeader(8 * BLOCK_BYTES, 0, b"n" * 16, 0))
    monkeypatch.undo()
    assert form.other_version(block) == 5
    assert form.unpack_region_header(block) is None
    assert form.other_version(block[:100]) is None


NONCE = bytes(range(16))
NAMESPACE = b"\x11" * 32
TENANT = b"\x22" * 16
PAGES = ((b"\xa1" * 32, b"hello"), (b"\xb2" * 32, b"kv"))
REGION_BYTES = 32 * 1024


def example_region() -> bytes:
    pages = form.page_table(
        (key, len(data), page_checksum(NAMESPACE, key, [data])) for key, data in PAGES
    )
    extent = Extent(BLOCK_BYTES, NAMESPACE, pages, TENANT)
    region = bytearray(REGION_BYTES)
    region[:BLOCK_BYTES] = form.pack_region_header(form.RegionHeader(REGION_BYTES, 7, NONCE, 1))
    region[BLOCK_BYTES : 2 * BLOCK_BYTES] = form.pack_extent_header(extent, NONCE, 0)
    for offset, (_, data) in zip(extent.page_offsets().tolist(), PAGES, strict=True):
        region[offset : offset + len(data)] = data
    footer = form.pack_footer(Contents.of([extent]), NONCE)
    footer_offset = REGION_BYTES - BLOCK_BYTES - len(footer)
    trailer = form.pack_trailer(NONCE, 1, footer_offset, len(footer))
    region[footer_offset:] = footer + trailer
    return bytes(region)


def hexdump(data: bytes) -> str:
    rows = [data[start : start + 16] for start in range(0, len(data), 16)]
    lines = []
    position = 0
    for row, group in itertools.groupby(rows):
        count = len(list(group))
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{position:06x}  {row.hex(' ')}  {text}")
        if count > 1:
            lines.append("*")
        position += count * 16
    lines.append(f"{position:06x}")
    return "\n".join(lines)


def test_the_worked_example_is_what_the_code_writes() -> None:
    example = Path(__file__).with_name("example.txt").read_text()
    assert example.endswith(f"\n\n{hexdump(example_region())}\n")
