"""The checkpoint is believed only when every byte of it verifies."""

from __future__ import annotations

import pytest

from sglang_tiered.storage.region.format import CheckpointEntry
from sglang_tiered.storage.region.format import pack_checkpoint as pack
from sglang_tiered.storage.region.format import unpack_checkpoint as unpack

ENTRIES = [
    CheckpointEntry(
        7,
        bytes(range(16)),
        8192,
    ),
    CheckpointEntry(9, b"n" * 16, 0),
]


@pytest.mark.parametrize("entries", [[], ENTRIES])
def test_round_trip(entries: list[CheckpointEntry]) -> None:
    assert unpack(pack(entries)) == entries


def test_every_flipped_byte_is_seen() -> None:
    data = pack(ENTRIES)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        assert unpack(bytes(damaged)) is None, f"byte {position}"


def test_a_cut_or_longer_file_is_refused() -> None:
    data = pack(ENTRIES)
    for length in range(len(data)):
        assert unpack(data[:length]) is None, f"{length} bytes"
    assert unpack(data + b"\0") is None


def test_a_tail_between_blocks_is_refused() -> None:
    assert unpack(pack([CheckpointEntry(7, b"n" * 16, 8191)])) is None
