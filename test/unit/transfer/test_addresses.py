"""Whom decode takes KV from without keys: its own machine, and whom it was told of."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_tiered.errors import ConfigError, TransferError
from sglang_tiered.transfer.addresses import check_is_allowed, is_own_address, parse_networks

OWN = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
OTHERS = ["203.0.113.1", "2001:db8::1", "::ffff:203.0.113.1"]
NO_ADDRESSES = ["localhost", "example.org", "not an address", ""]


def test_addresses_of_this_machine_alone_are_own() -> None:
    assert [host for host in (*OWN, *OTHERS, *NO_ADDRESSES) if is_own_address(host)] == OWN
    for host in OWN:
        check_is_allowed(host, ())


@pytest.mark.parametrize("host", [*OTHERS, *NO_ADDRESSES])
def test_unlisted_prefill_host_is_refused_with_advice(host: str) -> None:
    with pytest.raises(TransferError, match=r"--transfer-keys .* --transfer-allow"):
        check_is_allowed(host, ())
    with pytest.raises(
        TransferError, match=r"nor in --transfer-allow 192\.0\.2\.0/24,2001:db9::/32"
    ):
        check_is_allowed(host, parse_networks("--transfer-allow", "192.0.2.0/24, 2001:db9::/32"))


@pytest.mark.parametrize("host", [2130706433, True, None, b"\x7f\0\0\x01"])
def test_non_text_address_is_not_own(host: Any) -> None:
    """To Python these numbers and bytes are addresses; 2130706433 is 127.0.0.1."""
    assert not is_own_address(host)
    with pytest.raises(TransferError):
        check_is_allowed(host, ("0.0.0.0/0",))


@pytest.mark.parametrize("host", OTHERS)
def test_an_instance_elsewhere_that_is_named_is_allowed(host: str) -> None:
    check_is_allowed(host, parse_networks("--transfer-allow", "203.0.113.7/24,2001:db8::1"))


@pytest.mark.parametrize("text", ["", "192.0.2.0/24,", "prefill-1", "192.0.2.0/40", "1.2.3", "*"])
def test_invalid_network_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--transfer-allow .* is neither"):
        parse_networks("--transfer-allow", text)
