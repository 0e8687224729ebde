"""The worked examples beside this file, and the page about the index, are what the code writes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

import sglang_tiered.sharing as package
from sglang_tiered.sharing.locality import formats, purges
from sglang_tiered.sharing.locality.connection import MAX_REPLY_BYTES
from sglang_tiered.sharing.locality.formats import Delta, Purge, Role, ServerRecord, Serving
from sglang_tiered.sharing.locality.redis_keys import RedisKeys
from sglang_tiered.sharing.settings import PeerSettings

SERVER = "00112233445566778899aabbccddeeff"
NAMESPACE = b"\x11" * 32
PAGES = np.array([3, 0x7FFFFFFFFFFFFFFF], np.uint64)


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


def examples() -> list[bytes]:
    record = ServerRecord(NAMESPACE, SERVER, 1, 3, 2, 2, bytes(16), "tcp://192.0.2.7:7001")
    return [
        formats.pack_record(record),
        formats.pack_piece(SERVER, 2, 0, PAGES),
        formats.pack_delta(SERVER, 3, Delta(np.array([5], np.uint64), PAGES[:1])),
        formats.pack_purge(Purge(b"\x33" * 16, b"\x22" * 16)),
        formats.pack_forget(b"\x44" * 16, [b"\x55" * 32]),
        formats.pack_keys(b"\x44" * 16, [b"\x55" * 32]),
        formats.pack_serving(SERVER, Serving("http://192.0.2.7:30000", Role.PREFILL, 0, 8998)),
    ]


def page() -> str:
    return (Path(package.__file__).parent / "README.md").read_text()


def test_worked_examples_equal_the_packed_bytes() -> None:
    text = Path(__file__).with_name("examples.txt").read_text()
    for data in examples():
        assert f"\n\n{hexdump(data)}\n" in text, hexdump(data)


def test_documented_keys_equal_the_keys_made() -> None:
    names, text = RedisKeys.of(NAMESPACE), page()
    assert f"sgt1:{{{NAMESPACE.hex()}}}" == names.prefix
    for key in (
        names.servers,
        names.record("<id>"),
        names.serves("<id>"),
        names.pages("<id>", 0).removesuffix("0") + "<n>",
        names.changes("<id>", 0).removesuffix("0") + "<i>",
        names.news,
        names.purges,
        names.keys(bytes(16)).removesuffix("00" * 16) + "<number>",
    ):
        assert f"`{key.replace(names.prefix, '<ns>')}`" in text, key


def test_documented_figures_equal_the_settings() -> None:
    text, settings = page(), PeerSettings(index_url="redis://localhost")
    assert f"`max_pages` different pages ({settings.max_pages:,})" in text
    assert f"`max_peers` servers ({settings.max_peers})" in text
    assert f"Every `publish_s` ({settings.publish_s} s" in text
    assert f"Every heartbeat ({settings.heartbeat_s:.0f} s)" in text
    assert f"({settings.expiry_s:.0f} s after its last sign of life" in text
    assert f"({settings.purge_retention_s / 86400:.0f} days)" in text
    assert f"At most {purges.MAX_PURGES:,} purges" in text
    assert f"at most {formats.FORGET_KEYS:,} keys" in text
    assert f"of the newest {purges.MAX_KEPT}" in text
    assert f"{MAX_REPLY_BYTES >> 20} MiB" in text
    assert f"at most {formats.DELTA_PAGES} fingerprints" in text
    assert f"{formats.PIECE_PAGES} fingerprints in each but the last" in text
