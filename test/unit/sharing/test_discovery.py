"""Where other servers are: what is written, what resolves, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kit.waiting import eventually
from sglang_tiered.errors import ConfigError
from sglang_tiered.sharing.addresses import Target, parse_targets
from sglang_tiered.sharing.sync import PeerDiscovery


@pytest.mark.parametrize(
    "text",
    ["", ",", "host", "host:", "host:0", "host:70000", "http://h:1", "h:1/x", "::1:5", "dns://"],
)
def test_what_names_no_server_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="--tier-peers") as caught:
        parse_targets(text)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


Told = list[tuple[list[str], bool]]


@contextmanager
def looking(targets: list[Target], *ports: int) -> Iterator[tuple[PeerDiscovery, Told]]:
    told: Told = []
    discovery = PeerDiscovery(
        targets, ports, membership=None, found=lambda *found: told.append(found), every_s=0.02
    )
    try:
        eventually(lambda: told)
        yield discovery, told
    finally:
        discovery.close()


def test_a_name_is_resolved_to_every_rank() -> None:
    with looking([Target("localhost", 65_534), Target("127.0.0.9", 5)], 0, 2) as (one, told):
        wanted = {"tcp://127.0.0.1:65534", "tcp://127.0.0.9:5", "tcp://127.0.0.9:7"}
        addresses, is_whole = told[-1]
        assert wanted <= set(addresses) and is_whole
        assert "tcp://127.0.0.1:65536" not in addresses
        assert one.trouble == ""


def test_a_name_that_does_not_resolve_ends_nothing() -> None:
    """Neither at the start nor later, and others are found meanwhile."""
    targets = [Target("no-such-host.invalid", 1), Target("127.0.0.1", 2)]
    with looking(targets, 0) as (one, told):
        assert told[-1] == (["tcp://127.0.0.1:2"], False)
        assert "no-such-host.invalid:1 is not found" in one.trouble
        # What was known stays known once its name is gone.
        one._known["no-such-host.invalid:1"] = ["tcp://192.0.2.1:1"]
        eventually(lambda: told[-1] == (["tcp://192.0.2.1:1", "tcp://127.0.0.1:2"], True))
        assert one.num_failures > 1
        targets.pop(0)
        eventually(lambda: told[-1] == (["tcp://127.0.0.1:2"], True) and one.trouble == "")
