"""What this machine asks of itself goes through no proxy, and what was excepted stays so."""

from __future__ import annotations

from urllib.request import ProxyHandler

import httpx
import pytest
import requests

from sglang_tiered.loopback import ask_loopback_directly, is_loopback_url, opener_for


def urllib_proxies(url: str) -> dict[str, str]:
    handlers = opener_for(url).handlers
    return next((h.proxies for h in handlers if isinstance(h, ProxyHandler)), {})


@pytest.mark.parametrize("given", [{}, {"no_proxy": "a.org, ::1"}, {"NO_PROXY": "a.org"}])
def test_loopback_is_excepted_beside_others(given: dict[str, str]) -> None:
    environment = dict(given)
    for _ in range(2):
        ask_loopback_directly(environment)
    for variable in ("no_proxy", "NO_PROXY"):
        names = [name.strip() for name in environment[variable].split(",")]
        assert {"localhost", "127.0.0.1", "::1"} <= set(names) and len(names) == len(set(names))
        assert ("a.org" in names) == ("a.org" in str(given))


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1"])
def test_libraries_of_clients_read_the_exceptions(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = {"http_proxy": "http://192.0.2.1:9"}
    ask_loopback_directly(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert requests.utils.should_bypass_proxies(url, None)
    with httpx.Client() as client:  # of OpenAI's client
        proxied = client._transport_for_url(httpx.URL("http://192.0.2.2"))
        assert client._transport_for_url(httpx.URL(url)) is not proxied
    assert "http" not in urllib_proxies(url) and "http" in urllib_proxies("http://192.0.2.2")


HERE = ["http://127.0.0.1:1", "https://127.9.9.9", "http://localhost:1/x", "http://[::1]:1"]
ELSEWHERE = ["http://192.0.2.1:1", "http://127.example.org", "http://localhost.example.org"]


def test_urls_of_this_machine_are_told_apart() -> None:
    assert [url for url in (*HERE, *ELSEWHERE) if is_loopback_url(url)] == HERE
