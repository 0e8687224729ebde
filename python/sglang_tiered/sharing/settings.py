"""The settings that a server needs to share pages with others."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered.sharing.addresses import Target  # noqa: TC001 - msgspec reads it
from sglang_tiered.sharing.pages.followers import SIGN_OF_LIFE_S

__all__ = ["PeerSettings"]

MiB = 1 << 20


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ``ConfigError``, one sentence without a password, for values that cannot work."""

    peers: tuple[Target, ...] = ()
    """Names or addresses of servers, each with the port of its first rank. A server may be among
    its own."""

    ports: tuple[int, ...] = (0,)
    """Those of the ranks to follow, counted from the first rank's."""

    index_url: str | None = None
    """A Redis in which servers name themselves: ``redis://[user:password@]host[:port][/db]``,
    ``rediss://`` for TLS, or ``unix://``."""

    listen_host: str = "127.0.0.1"
    """The host on which other servers may ask for pages."""

    listen_port: int = 0
    """The port on which other servers may ask for pages. 0: any free one."""

    keys_directory: str | None = None
    """With keys everything between servers is encrypted, and only admitted ones are served."""

    max_pages: int = 4_000_000
    """Bounds the mirrored pages of other servers."""

    max_peers: int = 256
    """Bounds the mirrored servers."""

    publish_s: float = 0.5
    """How often this server looks what it has to tell."""

    look_s: float = 3.0
    """How often names are resolved again, and servers in the Redis looked for."""

    expiry_s: float = 10.0
    """A server that says nothing for longer counts as gone."""

    retention_s: float = 7 * 86400.0
    """A server that was away for longer may bring back pages that were erased meanwhile."""

    index_timeout_s: float = 3.0
    """Bounds connecting to the Redis, and each of its answers."""

    connect_timeout_s: float = 1.0
    """Bounds connecting to another server."""

    window_bytes: int = 64 * MiB
    """Bounds the pages under way from all servers together."""

    max_serving_bytes: int = 64 * MiB
    """Bounds the memory for pages on their way to other servers."""

    def __post_init__(self) -> None:
        if self.index_url is not None:
            self._parse_url()
        for name in (
            "max_pages",
            "max_peers",
            "publish_s",
            "look_s",
            "retention_s",
            "index_timeout_s",
            "connect_timeout_s",
            "window_bytes",
            "max_serving_bytes",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of peer sharing is {getattr(self, name)}, not above 0")
        if self.max_peers > 1024:
            raise ConfigError(f"max_peers is {self.max_peers}, must be at most 1024")
        if not self.expiry_s >= 2 * SIGN_OF_LIFE_S:
            raise ConfigError(
                f"expiry_s is {self.expiry_s}, must be at least {2 * SIGN_OF_LIFE_S:g}, as a sign "
                f"of life comes every {SIGN_OF_LIFE_S:g} s"
            )
        if self.index_url is not None and not self.expiry_s >= 2 * self.look_s:
            raise ConfigError(f"look_s is {self.look_s}, must be at most half of expiry_s")
        if not 0 <= self.listen_port <= 65535:
            raise ConfigError(f"the port for other servers is {self.listen_port}, not 0 to 65535")
        if not self.listen_host:
            raise ConfigError("the host for other servers is empty")

    def _parse_url(self) -> str:
        # Imported late: without a Redis its client is not needed.
        from sglang_tiered.sharing.index_url import parse_index_url

        assert self.index_url is not None
        return parse_index_url(self.index_url).shown

    @property
    def shown_peers(self) -> str:
        """Where other servers are looked for, as logs may show it."""
        shown = [f"{host}:{port}" for host, port in self.peers]
        return ", ".join(shown + ([self._parse_url()] if self.index_url is not None else []))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"PeerSettings({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        fields = [(name, getattr(self, name)) for name in self.__struct_fields__]
        url = None if self.index_url is None else self._parse_url()
        return [(name, url if name == "index_url" else it) for name, it in fields]
