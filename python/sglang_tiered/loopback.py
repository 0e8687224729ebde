"""Keeps what this machine asks of itself away from proxies.

An environment with ``http_proxy`` and no ``no_proxy`` sends what 127.0.0.1 is asked to the proxy,
which knows no server of this machine, and must not see its key.
"""

from __future__ import annotations

import ipaddress
import os
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import MutableMapping


_NAMES = ("localhost", "127.0.0.1", "::1")  # not [::1], with which httpx makes no client


def ask_loopback_directly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have this process, its libraries and its children ask loopback without a proxy. Changes the
    environment, as SGLang does of a process that it serves in."""
    for variable in ("no_proxy", "NO_PROXY"):
        other = variable.swapcase()
        given = environment.get(variable, environment.get(other, ""))
        names = [name for name in given.split(",") if name.strip()]
        present = {name.strip() for name in names}
        if "*" not in present:
            missing = [name for name in _NAMES if name not in present]
            environment[variable] = ",".join([*names, *missing])


def is_loopback(host: str) -> bool:
    """Whether only this machine is there, by what the name or the address says."""
    with suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_loopback_url(url: str) -> bool:
    """The same of a URL. Raises ``ValueError`` for what is none."""
    return is_loopback(urlsplit(url).hostname or "")


def opener_for(url: str) -> urllib.request.OpenerDirector:
    """What asks a URL: no proxy for one of this machine, which urllib would need told as ``[::1]``.
    Raises ``ValueError`` for what is none."""
    direct = [urllib.request.ProxyHandler({})] if is_loopback_url(url) else []
    return urllib.request.build_opener(*direct)
