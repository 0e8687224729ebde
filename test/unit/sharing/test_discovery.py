"""Where other servers are: what names some or none, and what does not resolve."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kit.waiting import eventually
from sglang_tiered.errors import ConfigError
from sglang_tiered.sharing import sync
from sglang_tiered.sharing.settings import Target, parse_targets
from sglang_tiered.sharing.sync import PeerDiscovery


def looking(
    targets: Sequence[Target], ports: Sequence[int], membership: Any = None, every_s: float = 0.02
) -> tuple[PeerDiscovery, list[tuple[list[str], bool]]]:
    """A discovery, and what it told."""
    told: list[tuple[list[str], bool]] = []
    found = lambda *found: told.append(found)  # noqa: E731
    return PeerDiscovery(targets, ports, membership=membership, found=found, every_s=every_s), told


def test_servers_are_named_by_host_and_port() -> None:
    named = [Target("192.0.2.5", 31000), Target("kv.svc", 9), Target("2001:db8::1", 9)]
    assert list(parse_targets("192.0.2.5:31000, dns://kv.svc:9,kv.svc:9,[2001:db8::1]:9,")) == named


@pytest.mark.parametrize(
    "text",
    ["", ",", "host", "host:", "host:0", "host:70000", "http://h:1", "h:1/x", "::1:5", "dns://"],
)
def test_what_names_no_server_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="--tier-peers") as caught:
        parse_targets(text)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_name_that_does_not_resolve_ends_nothing() -> None:
    """Neither at the start nor later, and others are found meanwhile."""
    targets = [Target("no-such-host.invalid", 1), Target("127.0.0.1", 65_534)]
    both = ["tcp://127.0.0.1:65534", "tcp://127.0.0.1:65535"]  # of ranks; there is no third
    one, told = looking(targets, (0, 1, 2))
    try:
        eventually(lambda: told[-1:] == [(both, False)])
        eventually(lambda: "no-such-host.invalid:1 is not found" in one.trouble)
        # What was known stays known once its name is gone.
        one._known["no-such-host.invalid:1"] = ["tcp://192.0.2.1:1"]
        eventually(lambda: told[-1] == (["tcp://192.0.2.1:1", *both], True))
        assert one.num_failures > 1
        targets.pop(0)
        eventually(lambda: told[-1] == (both, True) and one.trouble == "")
    finally:
        one.close()


def test_a_slow_name_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the record of this server, which expires unless it is renewed."""
    answered, resolve = threading.Event(), sync.resolve

    def slow(host: str) -> list[str]:
        assert host != "slow.example" or answered.wait(60.0)
        return resolve(host)

    monkeypatch.setattr(sync, "resolve", slow)
    exchanges: list[float] = []
    membership = SimpleNamespace(
        exchange=lambda: exchanges.append(time.monotonic()) or ["tcp://192.0.2.1:1"],
        close=lambda: None,
    )
    targets = [Target("slow.example", 1), Target("127.0.0.1", 2)]
    one, told = looking(targets, (0,), membership, every_s=0.5)
    try:
        eventually(lambda: any(b - a < 0.9 for a, b in pairwise(exchanges)), "twice as rare")
        eventually(lambda: told[-1:] == [(["tcp://127.0.0.1:2", "tcp://192.0.2.1:1"], False)])
    finally:
        answered.set()
        one.close()


def test_a_server_leaves_after_it_was_named() -> None:
    """Else an exchange under way names it again, and routers find it after its end."""
    begun, let_go, became = threading.Event(), threading.Event(), list[str]()

    def exchange() -> list[str]:
        begun.set()
        assert let_go.wait(60.0)
        became.append("named")
        return []

    membership = SimpleNamespace(exchange=exchange, close=lambda: became.append("gone"))
    one, _ = looking([], (0,), membership)
    assert begun.wait(60.0)
    one.close()
    let_go.set()
    eventually(lambda: became == ["named", "gone"])
