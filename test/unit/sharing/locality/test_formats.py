"""The formats of the locality index: what was packed comes back, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_tiered.sharing.locality import formats
from sglang_tiered.sharing.locality.formats import (
    DELTA_PAGES,
    PIECE_PAGES,
    Delta,
    Purge,
    Role,
    ServerRecord,
    Serving,
)

NAMESPACE = bytes(range(32))
SERVER = "0123456789abcdef" * 2
OTHER = "f" * 32
RECORD = ServerRecord(NAMESPACE, SERVER, 3, 41, 40, 2, b"d" * 16, "tcp://192.0.2.7:7001")
PAGES = np.array([3, 1 << 63, 5], np.uint64)


def test_record_of_a_foreign_server_is_none() -> None:
    data = formats.pack_record(RECORD)
    assert len(data) <= formats.MAX_RECORD_BYTES
    assert formats.unpack_record(data, NAMESPACE, SERVER) == RECORD
    assert formats.unpack_record(data, NAMESPACE, OTHER) is None
    assert formats.unpack_record(data, bytes(32), SERVER) is None


@pytest.mark.parametrize(
    "change",
    [
        {"snapshot": 0},
        {"snapshot": 42},
        {"sequence": 1 << 63, "snapshot": 1},
        {"num_pages": 1 << 40},
        {"address": "ipc:///tmp/socket"},
        {"address": "tcp://*:1"},
        {"address": "tcp://h:0"},
        {"address": "tcp://h:65536"},
        {"address": "tcp://a;b:1"},
        {"address": "tcp://h:1 "},
        {"address": ""},
    ],
)
def test_checksummed_record_out_of_bounds_is_none(change: dict[str, object]) -> None:
    data = formats.pack_record(RECORD._replace(**change))  # type: ignore[arg-type]
    assert formats.unpack_record(data, NAMESPACE, SERVER) is None


@pytest.mark.parametrize(
    "address", ["tcp://h:1", "tcp://192.0.2.7:65535", "tcp://[2001:db8::1]:7", "tcp://a-b.c_d:10"]
)
def test_remote_tcp_addresses_are_accepted(address: str) -> None:
    assert formats.is_address(address)


def test_piece_under_a_foreign_number_is_none() -> None:
    data = formats.pack_piece(SERVER, 7, 2, PAGES)
    found = formats.unpack_piece(data, SERVER, 7, 2)
    assert found is not None
    assert found.tolist() == PAGES.tolist()
    for place in ((OTHER, 7, 2), (SERVER, 8, 2), (SERVER, 7, 1)):
        assert formats.unpack_piece(data, *place) is None


@pytest.mark.parametrize("num_pages", [0, 1, PIECE_PAGES - 1, PIECE_PAGES, 2 * PIECE_PAGES + 3])
def test_pieces_lie_where_their_ranges_say(num_pages: int) -> None:
    pages = np.arange(1, num_pages + 1, dtype=np.uint64)
    cuts = range(0, max(num_pages, 1), PIECE_PAGES)
    data = b"".join(
        formats.pack_piece(SERVER, 7, piece, pages[start : start + PIECE_PAGES])
        for piece, start in enumerate(cuts)
    )
    found = []
    for piece in range(len(cuts)):
        start, end = formats.piece_range(piece, num_pages)
        part = formats.unpack_piece(data[start : end + 1], SERVER, 7, piece)
        assert part is not None
        found += part.tolist()
    assert end + 1 == len(data)
    assert found == pages.tolist()


def test_delta_under_a_foreign_number_is_none() -> None:
    delta = Delta(PAGES, PAGES[:1])
    data = formats.pack_delta(SERVER, 9, delta)
    found = formats.unpack_delta(data, SERVER, 9)
    assert found is not None
    assert [part.tolist() for part in found] == [part.tolist() for part in delta]
    assert formats.unpack_delta(data, SERVER, 10) is None
    assert formats.unpack_delta(data, OTHER, 9) is None


def test_delta_beyond_its_bound_is_none() -> None:
    pages = np.arange(DELTA_PAGES + 1, dtype=np.uint64)
    data = formats.pack_delta(SERVER, 9, Delta(pages, PAGES[:0]))
    assert formats.unpack_delta(data, SERVER, 9) is None


@pytest.mark.parametrize("tenant", [None, bytes(16), b"t" * 16])
def test_a_purge_comes_back(tenant: bytes | None) -> None:
    purge = Purge(b"n" * 16, tenant)
    assert formats.unpack_purge(formats.pack_purge(purge)) == purge


def test_a_flipped_bit_anywhere_is_none() -> None:
    for data, unpack in (
        (formats.pack_record(RECORD), lambda d: formats.unpack_record(d, NAMESPACE, SERVER)),
        (formats.pack_piece(SERVER, 7, 2, PAGES), lambda d: formats.unpack_piece(d, SERVER, 7, 2)),
        (
            formats.pack_delta(SERVER, 9, Delta(PAGES, PAGES)),
            lambda d: formats.unpack_delta(d, SERVER, 9),
        ),
        (formats.pack_purge(Purge(b"n" * 16, None)), formats.unpack_purge),
    ):
        assert unpack(data) is not None
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            assert unpack(bytes(flipped)) is None, bit
        for size in range(len(data)):
            assert unpack(data[:size]) is None, size
        assert unpack(data + b"\0") is None


def test_fingerprint_is_the_first_eight_key_bytes() -> None:
    keys = [bytes(range(32)), b"\xff" * 32]
    assert formats.fingerprints_of(keys).tolist() == [0x0706050403020100, (1 << 64) - 1]


SERVING = Serving("http://192.0.2.7:30000", Role.PREFILL, 3, 8998)


@pytest.mark.parametrize(
    "serving",
    [
        SERVING,
        Serving("https://[2001:db8::1]:443", Role.DECODE, 0),
        Serving("http://kv-3.example:1", Role.AGGREGATED, (1 << 32) - 1, 65535),
    ],
)
def test_served_address_of_a_foreign_server_is_none(serving: Serving) -> None:
    data = formats.pack_serving(SERVER, serving)
    assert len(data) <= formats.MAX_SERVING_BYTES
    assert formats.unpack_serving(data, SERVER) == serving
    assert formats.unpack_serving(data, OTHER) is None
    assert formats.unpack_record(data, NAMESPACE, SERVER) is None
    for place in range(len(data)):
        damaged = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        assert formats.unpack_serving(damaged, SERVER) is None
        assert formats.unpack_serving(data[:place], SERVER) is None


@pytest.mark.parametrize(
    "url",
    [
        *("", "192.0.2.7:1", "ftp://h:1", "http://h", "http://h:0", "http://h:70000"),
        *("http://u@h:1", "http://h:1/path", "http://h:1?a", "http://a;b:1"),
        "http://" + "h" * 250 + ":1",
    ],
)
def test_other_urls_are_no_served_address(url: str) -> None:
    assert not formats.is_serving(SERVING._replace(url=url))
    if len(url) < 250:
        assert (
            formats.unpack_serving(
                formats.pack_serving(SERVER, Serving(url, Role.DECODE, 0)), SERVER
            )
            is None
        )
