"""Where other servers are: what is written, what resolves, and what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.waiting import eventually
from sglang_tiered.errors import ConfigError
from sglang_tiered.sharing.addresses import Target, parse_targets
from sglang_tiered.sharing.discovery import Discovery

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("192.0.2.5:31000", [Target("192.0.2.5", 31000)]),
        ("dns://kv.prod.svc:31000", [Target("kv.prod.svc", 31000)]),
        ("a:1, b:2,a:1,", [Target("a", 1), Target("b", 2)]),
        ("[2001:db8::1]:9", [Target("2001:db8::1", 9)]),
    ],
)
def test_servers_are_named_by_host_and_port(text: str, targets: list[Target]) -> None:
    assert list(parse_targets(text)) == targets


@pytest.mark.parametrize(
    "text",
    ["", ",", "host", "host:", "host:0", "host:70000", "http://h:1", "h:1/x", "::1:5", "dns://"],
)
def test_what_names_no_server_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="--tier-peers") as caught:
        parse_targets(text)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


class Found:
    """A discovery, and what it told."""

    def __init__(self, *targets: Target, ports: tuple[int, ...] = (0,)) -> None:
        self.told: list[list[str]] = []
        self.targets = list(targets)
        self.discovery = Discovery(
            self.targets, ports, membership=None, found=self._found, every_s=0.02
        )

    def _found(self, addresses: list[str], is_whole: bool) -> None:
        self.is_whole = is_whole
        self.told.append(addresses)


@pytest.fixture
def opened() -> Iterator[list[Found]]:
    found: list[Found] = []
    yield found
    for each in found:
        each.discovery.close()


def test_a_name_is_resolved_to_every_rank(opened: list[Found]) -> None:
    opened.append(Found(Target("localhost", 65_534), Target("127.0.0.9", 5), ports=(0, 2)))
    eventually(lambda: opened[0].told)
    wanted = {"tcp://127.0.0.1:65534", "tcp://127.0.0.9:5", "tcp://127.0.0.9:7"}
    assert wanted <= set(opened[0].told[-1])
    assert "tcp://127.0.0.1:65536" not in opened[0].told[-1]
    assert opened[0].discovery.trouble == ""


def test_a_name_that_does_not_resolve_ends_nothing(opened: list[Found]) -> None:
    """Neither at the start nor later, and others are found meanwhile."""
    opened.append(Found(Target("no-such-host.invalid", 1), Target("127.0.0.1", 2)))
    one = opened[0]
    eventually(lambda: one.told)
    assert one.told[-1] == ["tcp://127.0.0.1:2"] and not one.is_whole
    assert "no-such-host.invalid:1 is not found" in one.discovery.trouble
    # What was known stays known once its name is gone.
    one.discovery._known["no-such-host.invalid:1"] = ["tcp://192.0.2.1:1"]
    num_told = len(one.told)
    eventually(lambda: len(one.told) > num_told + 1)
    assert "tcp://192.0.2.1:1" in one.told[-1] and one.is_whole
    assert one.discovery.num_failures > 1
    one.targets.pop(0)
    eventually(lambda: one.told[-1] == ["tcp://127.0.0.1:2"])


def test_asking_again_says_whether_all_was_found(opened: list[Found]) -> None:
    opened += [Found(Target("localhost", 1)), Found(Target("no-such-host.invalid", 1))]
    good, bad = opened
    assert good.discovery.look().result(20) is True
    assert bad.discovery.look().result(20) is False
    good.discovery.close()
    assert good.discovery.look().result(0) is False
