"""The worked example beside this file is what the code writes."""

from __future__ import annotations

import itertools
from pathlib import Path

from sglang_tiered.checksummed import page_checksum
from sglang_tiered.storage.region import format as form
from sglang_tiered.storage.region.format import BLOCK_BYTES

NONCE = bytes(range(16))
NAMESPACE = b"\x11" * 32
TENANT = b"\x22" * 16
PAGES = ((b"\xa1" * 32, b"hello"), (b"\xb2" * 32, b"kv"))
REGION_BYTES = 32 * 1024


def example_region() -> bytes:
    pages = form.page_table(
        (key, len(data), page_checksum(NAMESPACE, key, [data])) for key, data in PAGES
    )
    extent = form.Extent(BLOCK_BYTES, NAMESPACE, pages, TENANT)
    region = bytearray(REGION_BYTES)
    region[:BLOCK_BYTES] = form.pack_region_header(form.RegionHeader(REGION_BYTES, 7, NONCE, 1))
    region[BLOCK_BYTES : 2 * BLOCK_BYTES] = form.pack_extent_header(extent, NONCE, 0)
    for offset, (_, data) in zip(extent.page_offsets().tolist(), PAGES, strict=True):
        region[offset : offset + len(data)] = data
    footer = form.pack_footer(form.Contents.of([extent]), NONCE)
    footer_offset = REGION_BYTES - BLOCK_BYTES - len(footer)
    trailer = form.pack_trailer(form.Trailer(NONCE, 1, footer_offset, len(footer)))
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
