"""``Source``: where servers come from."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Source"]

logger = logging.getLogger(__name__)


class Source:
    """A file of URLs, or a name of the DNS. Raises ``ConfigError``."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._name = re.fullmatch(r"dns://([^/:\s]+):(\d{1,5})", text)
        if self._name is None and "://" in text:
            raise ConfigError(
                f"--servers {text} is neither a file nor dns://NAME:PORT; name one of them."
            )
        self._path = Path(text).expanduser()
        self._known: dict[str, str] = {}
        self.read()

    def read(self) -> list[str] | None:
        """Return the URLs in the file; None for a name, which ``resolved`` asks for."""
        if self._name is not None:
            return None
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--servers {self._text} cannot be read ({error}); name a file with one URL a line."
            ) from error
        # ``- `` is how YAML lists them.
        words = (line.partition("#")[0].strip().removeprefix("- ").strip("\"'") for line in lines)
        return [_checked(word.rstrip("/"), self._text) for word in words if word]

    async def resolved(self) -> dict[str, str]:
        """Return URLs by ``IP:PORT``. A name that cannot be resolved now keeps the address that it
        had, and is missing without one. Raises ``ConfigError``, and ``OSError`` for a name of
        ``dns://``."""
        loop = asyncio.get_running_loop()
        urls = self.read()
        if urls is None:
            assert self._name is not None
            name, port = self._name[1], int(self._name[2])
            entries = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            return {address: f"http://{address}" for address in map(_address, entries)}
        known, self._known = self._known, {}
        for url in urls:
            parts = urlsplit(url)
            try:
                entries = await loop.getaddrinfo(
                    parts.hostname, parts.port, type=socket.SOCK_STREAM
                )
                self._known[url] = _address(entries[0])
            except OSError as error:
                if url in known:
                    self._known[url] = known[url]
                logger.warning("%s cannot be resolved: %s", url, error.strerror)
        return {address: url for url, address in self._known.items()}


def _checked(url: str, source: str) -> str:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme == "http" and parts.hostname and parts.port and not parts.path
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(
            f"--servers {source} has {url!r}, which is no URL of a server; write http://HOST:PORT."
        )
    return url


def _address(entry: Sequence[Any]) -> str:
    host, port = str(entry[4][0]), entry[4][1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
