"""The worked examples beside this file, and the names of the page, are what the code writes."""

from __future__ import annotations

import itertools
from pathlib import Path

import sglang_tiered.storage.object as package
from sglang_tiered.storage.object.format import (
    Manifest,
    Purge,
    pack_manifest,
    pack_purge,
    pack_tail,
    page_checksum,
    page_table,
)
from sglang_tiered.storage.object.names import Layout, ObjectId, tenant_tag

NAMESPACE = b"\x11" * 32
TENANT = b"\x22" * 16
PAGES = ((b"\xa1" * 32, b"hello"), (b"\xb2" * 32, b"kv"))
ID = ObjectId(1_700_000_000_000, 0xDEADBEEF, 7, tenant_tag(TENANT))


def example_manifest() -> bytes:
    rows, offset = [], 0
    for key, data in PAGES:
        rows.append((key, offset, len(data), len(data), page_checksum(NAMESPACE, key, [data])))
        offset += len(data)
    return pack_manifest(Manifest(ID, NAMESPACE, TENANT, "none", page_table(rows), offset))


def example_object() -> bytes:
    payload = b"".join(data for _, data in PAGES)
    return payload + example_manifest() + pack_tail(len(PAGES))


def hexdump(data: bytes) -> str:
    rows = [data[start : start + 16] for start in range(0, len(data), 16)]
    lines = []
    position = 0
    for row, group in itertools.groupby(rows):
        count = len(list(group))
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{position:06x}  {row.hex(' '):47}  {text}")
        if count > 1:
            lines.append("*")
        position += len(row) + (count - 1) * 16
    lines.append(f"{position:06x}")
    return "\n".join(lines)


def page() -> str:
    return (Path(package.__file__).parent / "README.md").read_text()


def test_the_worked_examples_are_what_the_code_writes() -> None:
    examples = Path(__file__).with_name("examples.txt").read_text()
    for data in (
        example_object(),
        pack_purge(Purge(NAMESPACE, TENANT, ID.unix_ms)),
        pack_purge(Purge(NAMESPACE, None, ID.unix_ms + 60_000, (PAGES[0][0],))),
    ):
        assert f"\n\n{hexdump(data)}\n" in examples, hexdump(data)


def test_the_names_are_what_the_code_makes() -> None:
    assert str(ID) in page()
    layout = Layout(NAMESPACE)
    for path in (layout.object("<id>"), layout.manifest("<id>"), layout.purge("<id>")):
        assert path.replace(NAMESPACE.hex(), "<namespace, 64 hex digits>") in page()
