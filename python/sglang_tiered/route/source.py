"""``Source``: where servers come from."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from urllib.parse import urlsplit

from sglang_tiered.errors import ConfigError
from sglang_tiered.extras import require
from sglang_tiered.sharing.settings import parse_index_url, resolve

REDIS = ("redis", "rediss", "unix")
REDIS_S = 1.0

logger = logging.getLogger(__name__)


class Source:
    """A file of URLs, a name of the DNS, or a Redis in which servers name themselves. Raises
    ``ConfigError``."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._name = re.fullmatch(r"dns://([^/:\s]+):(\d{1,5})", text)
        if self._name is not None and not 0 < int(self._name[2]) < 1 << 16:
            self._name = None
        self._shown, self.is_redis = text, text.partition("://")[0] in REDIS
        if self.is_redis:
            require("--servers redis://", "redis")
            self._shown = parse_index_url(text).shown  # without a password
        elif self._name is None and "://" in text:
            raise ConfigError(
                f"--servers {text} is neither a file, nor dns://NAME:PORT, nor redis://HOST; name "
                "one of them."
            )
        self._path = Path(text).expanduser()
        self._known: dict[str, str] = {}
        self.read()

    def read(self) -> list[str] | None:
        """Return the URLs in the file; None for what ``resolved`` asks."""
        if self._name is not None or self.is_redis:
            return None
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--servers {self._text} cannot be read ({error}); name a file with one URL a line."
            ) from error
        # ``- `` is how YAML lists them.
        words = (line.partition("#")[0].strip().removeprefix("- ").strip("\"'") for line in lines)
        return [_checked(word.rstrip("/"), self._shown) for word in words if word]

    async def resolved(self) -> dict[str, str]:
        """Return URLs by ``IP:PORT``. A name that cannot be resolved now keeps the address that it
        had, and is missing without one. Raises ``ConfigError``, also where nobody is named,
        ``OSError`` for a name of ``dns://``, and ``TransferError`` for a Redis."""
        return await asyncio.to_thread(self._resolved)

    def _resolved(self) -> dict[str, str]:
        if self._name is not None:
            found = [_address(host, int(self._name[2])) for host in resolve(self._name[1])]
            return {address: f"http://{address}" for address in found}
        if self.is_redis:
            from sglang_tiered.sharing.membership import read_servings

            found = [serving.url for serving in read_servings(self._text, REDIS_S)]
            urls = [url for url in found if url.startswith("http://")]
        else:
            urls = self.read() or []
        known: dict[str, str] = {}
        for url in dict.fromkeys(urls):
            try:
                parts = urlsplit(_checked(url, self._shown))
                known[url] = _address(resolve(parts.hostname or "")[0], parts.port or 0)
            except OSError as error:
                if url in self._known:
                    known[url] = self._known[url]
                logger.warning("%s cannot be resolved: %s", url, error.strerror)
        if not known and not self.is_redis:  # half written
            raise ConfigError(f"--servers {self._shown} names no server; name one there.")
        self._known = known
        return {address: url for url, address in known.items()}


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


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
