"""What the page protocol takes for a message, and which addresses are ours."""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest

from sglang_tiered.checksummed import page_checksum
from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.link import check_address
from sglang_tiered.sharing.pages.messages import (
    MAX_CLIENT_FRAME_BYTES,
    MAX_PAGE_BYTES,
    MAX_REQUEST_PAGES,
    VERSION_FRAME,
)
from sglang_tiered.wire.sockets import encode

NAMESPACE = b"n" * 32


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in range(count)]


def test_largest_request_fits_the_frame_bound() -> None:
    lengths = [MAX_PAGE_BYTES // MAX_REQUEST_PAGES] * MAX_REQUEST_PAGES
    fetch = messages.Fetch(
        (1 << 62) - 1, NAMESPACE, b"".join(keys(MAX_REQUEST_PAGES)), lengths, 3_600_000
    )
    assert fetch.split_keys()
    assert len(encode(fetch)) < MAX_CLIENT_FRAME_BYTES


def test_the_worked_bytes_of_the_checksum() -> None:
    """XXH3-64 over namespace, key and bytes: whoever speaks the protocol gets the same number."""
    assert page_checksum(b"n" * 32, b"k" * 32, [b"pa", b"", b"ge"]) == 0x8D8E221F6F8F2683
    assert msgspec.msgpack.decode(encode(messages.Busy(7))) == ["busy", 7]


def test_mutated_message_raises_only_a_transfer_error() -> None:
    source = random.Random(1)
    fetch = messages.Fetch(1, NAMESPACE, b"".join(keys(3)), [5, 6, 7], 1000)
    found = messages.Found(1, [2**64 - 1, None, 0])
    erased = messages.ErasureNotice(b"i" * 16, 1.5, None, b"".join(keys(2)))
    follow = messages.Follow(NAMESPACE, b"s" * 16, b"d" * 16, b"t" * 16, 1, 2, None)
    changes = messages.Changes(NAMESPACE, b"s" * 16, b"d" * 16, 1, 2, 0, None, 3, 4, False)
    compare, teach = messages.Compare(NAMESPACE, b"8" * 64), messages.Teach(NAMESPACE, [erased])
    told = messages.Erasures(b"d" * 16, [erased], b"8" * 8)
    pages = (fetch, found, messages.Refuse("because"))
    for frame in map(encode, (*pages, follow, changes, compare, teach, told)):
        for _ in range(2000):
            changed = bytearray(frame)
            for _ in range(source.randrange(1, 4)):
                changed[source.randrange(len(changed))] = source.randrange(256)
            cut = (
                changed[: source.randrange(len(changed) + 1)] if source.random() < 0.3 else changed
            )
            for decode in (messages.decode_from_client, messages.decode_from_server):
                with contextlib.suppress(TransferError):
                    message = decode([VERSION_FRAME, bytes(cut)])
                    if isinstance(message, messages.Fetch):
                        message.split_keys()


GOOD_ADDRESSES = ["tcp://127.0.0.1:1", "tcp://192.0.2.7:65535", "tcp://[::1]:9000"]
BAD_PORTS = "tcp:// tcp://127.0.0.1 tcp://127.0.0.1:0 tcp://127.0.0.1:65536 tcp://127.0.0.1:1/x"
BAD_HOSTS = "tcp://127.0.0.1:* tcp://*:9000 tcp://localhost:9000 tcp://::1:9000 tcp://[::g]:9000"
OTHERS = "tcp://127.0.0.1.5:9 tcp://eth0;127.0.0.1:9 ipc:///tmp/x inproc://x udp://127.0.0.1:9000"
BAD_ADDRESSES = " ".join((BAD_PORTS, BAD_HOSTS, OTHERS)).split()


@pytest.mark.parametrize("address", GOOD_ADDRESSES)
def test_ip_and_port_are_accepted(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:9000\n", *BAD_ADDRESSES])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(TransferError, match="tcp://IP:PORT"):
        check_address(address)
