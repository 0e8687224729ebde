"""The settings that a server needs to share pages with others."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered.sharing.locality.url import parse_index_url

__all__ = ["PeerSettings"]

MiB = 1 << 20


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ``ConfigError``, one sentence without a password, for values that cannot work."""

    index_url: str
    """``redis://[user:password@]host[:port][/db]``, ``rediss://`` for TLS, or ``unix://``."""

    listen_host: str = "127.0.0.1"
    """The host on which other servers may ask for pages."""

    listen_port: int = 0
    """The port on which other servers may ask for pages. 0: any free one."""

    advertised_host: str | None = None
    """The host that other servers connect to. None: ``listen_host``, or if that stands for every
    address of this machine, the one on the route to the index."""

    keys_directory: str | None = None
    """With keys everything between servers is encrypted, and only admitted ones are served."""

    max_pages: int = 4_000_000
    """Bounds the mirrored pages of other servers."""

    max_peers: int = 256
    """Bounds the mirrored servers."""

    publish_s: float = 0.5
    """How often changes of this server are published."""

    heartbeat_s: float = 2.0
    """How often this server gives a sign of life in the index, and looks for those of others."""

    expiry_s: float = 10.0
    """A server whose last sign of life is older counts as gone."""

    purge_retention_s: float = 7 * 86400.0
    """A server that was away for longer may bring back pages of tenants purged meanwhile."""

    index_timeout_s: float = 3.0
    """Bounds connecting to the index, and each of its answers."""

    connect_timeout_s: float = 1.0
    """Bounds connecting to another server."""

    window_bytes: int = 64 * MiB
    """Bounds the pages under way from all servers together."""

    max_serving_bytes: int = 64 * MiB
    """Bounds the memory for pages on their way to other servers."""

    def __post_init__(self) -> None:
        parse_index_url(self.index_url)
        for name in (
            "max_pages",
            "max_peers",
            "publish_s",
            "heartbeat_s",
            "purge_retention_s",
            "index_timeout_s",
            "connect_timeout_s",
            "window_bytes",
            "max_serving_bytes",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of peer sharing is {getattr(self, name)}, not above 0")
        if self.max_peers > 1024:
            raise ConfigError(f"max_peers is {self.max_peers}, must be at most 1024")
        if not self.expiry_s >= 2 * self.heartbeat_s:
            raise ConfigError(
                f"expiry_s is {self.expiry_s}, must be at least twice heartbeat_s, "
                f"{self.heartbeat_s}"
            )
        if not 0 <= self.listen_port <= 65535:
            raise ConfigError(f"the port for other servers is {self.listen_port}, not 0 to 65535")
        if not self.listen_host:
            raise ConfigError("the host for other servers is empty")

    @property
    def shown_url(self) -> str:
        """The URL of the index as logs may show it."""
        return parse_index_url(self.index_url).shown

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        fields["index_url"] = self.shown_url
        return f"PeerSettings({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        fields = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return [(name, self.shown_url if name == "index_url" else it) for name, it in fields]
