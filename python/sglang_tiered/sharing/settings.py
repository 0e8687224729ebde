"""The settings that a server needs to share pages with others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.sharing.addresses import Target
    from sglang_tiered.sharing.index_url import IndexUrl

__all__ = ["PeerSettings"]


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """``peers``: names or addresses of servers, each with the port of its first rank; a server may
    be among its own. ``ports``: those of the ranks to follow, counted from there. ``index``: a
    Redis in which servers name themselves."""

    peers: Sequence[Target] = ()
    ports: tuple[int, ...] = (0,)
    index: IndexUrl | None = None

    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    """Where other servers may ask for pages. 0: any free one."""

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

    @property
    def shown_peers(self) -> str:
        """Where other servers are looked for, as logs may show it."""
        shown = [f"{host}:{port}" for host, port in self.peers]
        return ", ".join(shown + ([self.index.shown] if self.index is not None else []))
