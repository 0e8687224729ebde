"""Where servers come from: files, and names that come and go."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from sglang_tiered.route.settings import Source

NAMES = {"one.test": "192.0.2.1", "two.test": "192.0.2.2", "six.test": "2001:db8::6"}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the DNS knows. A test changes it."""
    known = dict(NAMES)

    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        rest = (0, 0) if ":" in known[host] else ()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port, *rest))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def resolved(source: Source) -> dict[str, str]:
    # The loop that SGLang's import makes the default asks the system, not what is patched here.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(source.resolved())


def test_lists_of_urls_are_read(tmp_path: Path, names: dict[str, str]) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text("# two\n- http://one.test:1\n\n- 'http://six.test:2/'  # the last\n")
    assert resolved(Source(str(file))) == {
        "192.0.2.1:1": "http://one.test:1",
        "[2001:db8::6]:2": "http://six.test:2",
    }


def test_lost_name_holds_up_no_other(tmp_path: Path, names: dict[str, str]) -> None:
    file = tmp_path / "servers"
    file.write_text("http://absent.test:1\nhttp://one.test:1\n")
    source = Source(str(file))
    assert resolved(source) == {"192.0.2.1:1": "http://one.test:1"}
    del names["one.test"]
    names["absent.test"] = "192.0.2.9"
    both = {"192.0.2.9:1": "http://absent.test:1", "192.0.2.1:1": "http://one.test:1"}
    assert resolved(source) == both
    names["one.test"] = "192.0.2.7"
    assert resolved(source)["192.0.2.7:1"] == "http://one.test:1"


def test_addresses_of_a_name_are_servers(names: dict[str, str]) -> None:
    source = Source("dns://two.test:30000")
    assert resolved(source) == {"192.0.2.2:30000": "http://192.0.2.2:30000"}
    del names["two.test"]
    with pytest.raises(OSError, match="unknown"):
        resolved(source)
