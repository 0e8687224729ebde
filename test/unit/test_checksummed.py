"""A sealed file is read as it was written, or not at all."""

from __future__ import annotations

import msgspec
import xxhash

from sglang_tiered.checksummed import seal, unseal


class File(msgspec.Struct):
    name: str
    numbers: list[int]


def test_any_changed_or_missing_byte_reads_as_none() -> None:
    data = seal(File("a name", [1, 2, 3]))
    assert unseal(data, File) == File("a name", [1, 2, 3])
    for at in range(len(data)):
        assert unseal(data[:at], File) is None
        assert unseal(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], File) is None


def test_whole_file_of_another_kind_is_none() -> None:
    assert unseal(seal([1, 2]), File) is None
    body = msgspec.msgpack.encode(File("a name", [])).replace(b"a name", b"\xff" * 6)
    assert unseal(xxhash.xxh3_64_digest(body) + body, File) is None
