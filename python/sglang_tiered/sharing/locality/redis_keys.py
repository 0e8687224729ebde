"""The keys in Redis of one namespace."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Names"]


class Names(NamedTuple):
    """The braces keep a namespace together where keys are spread by hash."""

    prefix: str

    @classmethod
    def of(cls, namespace: bytes) -> Names:
        return cls(f"sgt1:{{{namespace.hex()}}}")

    @property
    def servers(self) -> str:
        """Set of the ids of servers, dead ones perhaps among them."""
        return f"{self.prefix}:servers"

    @property
    def purges(self) -> str:
        """Sorted set of purges, by Redis' clock in milliseconds."""
        return f"{self.prefix}:purges"

    @property
    def news(self) -> str:
        """Stream that wakes readers; what its entries say does not count."""
        return f"{self.prefix}:news"

    def record(self, server: str) -> str:
        """String: the sign of life of a server."""
        return f"{self.prefix}:server:{server}"

    def pages(self, server: str, sequence: int) -> str:
        """String: the pages of a server as of a sequence number."""
        return f"{self.prefix}:pages:{server}:{sequence}"

    def changes(self, server: str, incarnation: int) -> str:
        """Stream: what came and went since, by sequence numbers."""
        return f"{self.prefix}:changes:{server}:{incarnation}"
