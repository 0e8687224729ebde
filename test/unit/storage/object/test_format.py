"""Manifests and purges come back as they were, and damaged bytes come back as nothing."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import xxhash

from kit.runs import NAMESPACE
from sglang_tiered.storage.object.format import (
    FORMAT_VERSION,
    MAX_OBJECT_BYTES,
    TAIL_BYTES,
    Manifest,
    Purge,
    manifest_bytes,
    other_version,
    pack_manifest,
    pack_purge,
    pack_tail,
    page_table,
    unpack_manifest,
    unpack_purge,
    unpack_tail,
)
from sglang_tiered.storage.object.names import MAX_UNIX_MS, ObjectId

ID = ObjectId(1234, 5, 6, 7)
TENANT = b"\x22" * 16


def manifest(codec: str = "none", lengths: tuple[int, ...] = (10, 20, 30)) -> Manifest:
    rows, offset = [], 0
    for number, length in enumerate(lengths):
        rows.append((bytes([number]) * 32, offset, length, length, 1000 + number))
        offset += length
    return Manifest(ID, NAMESPACE, TENANT, codec, page_table(rows), offset)


def closed(body: bytes) -> bytes:
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_a_manifest_comes_back() -> None:
    original = manifest()
    data = pack_manifest(original)
    assert len(data) == manifest_bytes(3)
    found = unpack_manifest(data)
    assert found is not None
    assert found._replace(pages=original.pages) == original
    assert (found.pages == original.pages).all()
    assert found.object_bytes == 60 + len(data) + TAIL_BYTES
    assert (found.num_bytes, found.page_bytes) == (60, None)


def test_any_flipped_bit_or_lost_byte_is_nothing() -> None:
    for data, unpack in (
        (pack_manifest(manifest()), unpack_manifest),
        (pack_purge(Purge(NAMESPACE, TENANT, 99)), unpack_purge),
    ):
        for position in range(len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 1 << (position % 8)
            assert unpack(bytes(damaged)) is None
            assert unpack(data[:position]) is None
            assert other_version(bytes(damaged)) is None


@pytest.mark.parametrize(
    "rows",
    [
        [(b"k" * 32, 0, 10, 10, 1), (b"l" * 32, 9, 10, 10, 1)],  # pages overlap
        [(b"k" * 32, 0, 0, 0, 1)],
        [(b"k" * 32, 5, 16, 16, 1)],  # beyond the payload
        [(b"k" * 32, 0, 10, 11, 1)],  # another length, and no codec
        [(b"k" * 32, 2**32 - 4, 8, 8, 1)],
    ],
)
def test_a_table_that_cannot_be_is_nothing(rows: list[tuple[bytes, int, int, int, int]]) -> None:
    bad = Manifest(ID, NAMESPACE, TENANT, "none", page_table(rows), 20)
    assert unpack_manifest(pack_manifest(bad)) is None


def test_under_a_codec_all_pages_have_one_length() -> None:
    rows = [(b"k" * 32, 0, 7, 100, 1), (b"l" * 32, 7, 9, 100, 2)]
    good = Manifest(ID, NAMESPACE, TENANT, "split-zstd", page_table(rows), 16)
    found = unpack_manifest(pack_manifest(good))
    assert found is not None
    assert (found.codec, found.page_bytes) == ("split-zstd", 100)
    rows[1] = (b"l" * 32, 7, 9, 101, 2)
    assert unpack_manifest(pack_manifest(good._replace(pages=page_table(rows)))) is None


def test_sizes_beyond_all_reason_are_nothing() -> None:
    data = pack_manifest(manifest()._replace(payload_bytes=MAX_OBJECT_BYTES + 1))
    assert unpack_manifest(data) is None
    assert unpack_purge(pack_purge(Purge(NAMESPACE, None, MAX_UNIX_MS + 1))) is None


def test_a_newer_version_is_told_from_damage() -> None:
    data = bytearray(pack_manifest(manifest())[:-8])
    data[8:12] = struct.pack("<I", FORMAT_VERSION + 1)
    newer = closed(bytes(data) + b"more")
    assert other_version(newer) == FORMAT_VERSION + 1
    assert unpack_manifest(newer) is None
    assert other_version(pack_manifest(manifest())) is None
    assert other_version(closed(b"SOMEBODY" + struct.pack("<I", 9))) is None


def test_what_unpacks_from_noise_is_nothing() -> None:
    source = random.Random(3)
    for nbytes in (0, 1, 11, 88, manifest_bytes(1), 4096):
        noise = source.randbytes(nbytes)
        assert unpack_manifest(noise) is None
        assert unpack_purge(noise) is None
        assert unpack_tail(noise) is None


def test_the_tail_leads_to_the_manifests_copy() -> None:
    packed = pack_manifest(manifest())
    data = bytes(60) + packed + pack_tail(3)
    nbytes = unpack_tail(data)
    assert nbytes == len(packed)
    assert unpack_manifest(data[-TAIL_BYTES - nbytes : -TAIL_BYTES]) is not None


def test_a_purge_of_a_tenant_and_of_everyone() -> None:
    for purge in (Purge(NAMESPACE, TENANT, 99), Purge(NAMESPACE, None, 0)):
        assert unpack_purge(pack_purge(purge)) == purge


def test_the_table_is_a_copy() -> None:
    data = bytearray(pack_manifest(manifest()))
    found = unpack_manifest(data)
    data[:] = bytes(len(data))
    assert found is not None
    assert np.ascontiguousarray(found.pages["checksum"]).tolist() == [1000, 1001, 1002]
