"""The checkpoint: what recovery would rather not find out again. Pure, but for one read.

An accelerator, never the truth: it lets recovery skip verifying what a sync already covered in the
region that was open. Without it everything is still found. An entry counts only for the region
whose nonce it names, so a checkpoint of another time or another store says nothing.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from sglang_tiered.storage.region.files import CHECKPOINT_NAME
from sglang_tiered.storage.region.format import BLOCK_BYTES, FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tiered.storage.region.device import Device

__all__ = ["CheckpointEntry", "pack", "read", "unpack"]

MAGIC = b"SGLTCHKP"

_HEADER = struct.Struct("<8sIIQ")  # magic version num_regions reserved
_ENTRY = struct.Struct("<Q16sQ")  # sequence nonce durable_tail
_CHECKSUM = struct.Struct("<Q")


class CheckpointEntry(NamedTuple):
    """One region. ``durable_tail``: all before it was acknowledged and synced."""

    sequence: int
    nonce: bytes
    durable_tail: int


def pack(entries: Iterable[CheckpointEntry]) -> bytes:
    rows = [_ENTRY.pack(*entry) for entry in entries]
    body = _HEADER.pack(MAGIC, FORMAT_VERSION, len(rows), 0) + b"".join(rows)
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def unpack(data: bytes) -> list[CheckpointEntry] | None:
    """Unpack a checkpoint; ``None`` for bytes that do not verify."""
    if len(data) < _HEADER.size + _CHECKSUM.size:
        return None
    body = data[: -_CHECKSUM.size]
    if _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0] != xxhash.xxh3_64_intdigest(body):
        return None
    magic, version, num_regions, _ = _HEADER.unpack_from(body)
    if (magic, version) != (MAGIC, FORMAT_VERSION):
        return None
    if len(body) != _HEADER.size + num_regions * _ENTRY.size:
        return None
    entries = [CheckpointEntry(*row) for row in _ENTRY.iter_unpack(body[_HEADER.size :])]
    return entries if all(entry.durable_tail % BLOCK_BYTES == 0 for entry in entries) else None


def read(device: Device) -> dict[tuple[int, bytes], CheckpointEntry]:
    """Return the entries by sequence and nonce; empty when there is no valid checkpoint."""
    try:
        entries = unpack(device.read_file(CHECKPOINT_NAME))
    except OSError:
        entries = None
    return {(entry.sequence, entry.nonce): entry for entry in entries or ()}
