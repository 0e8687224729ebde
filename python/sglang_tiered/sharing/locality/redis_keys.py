"""The keys in Redis of one namespace."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RedisKeys"]


class RedisKeys(NamedTuple):
    """Makes the keys. Their braces keep a namespace on one shard of a cluster."""

    prefix: str

    @classmethod
    def of(cls, namespace: bytes) -> RedisKeys:
        """The keys of a namespace."""
        return cls(f"sgt1:{{{namespace.hex()}}}")

    @property
    def servers(self) -> str:
        """Set of the ids of servers, perhaps with dead ones."""
        return f"{self.prefix}:servers"

    @property
    def purges(self) -> str:
        """Sorted set of purges and forgets, by their time in milliseconds of Redis' clock."""
        return f"{self.prefix}:purges"

    def keys(self, number: bytes) -> str:
        """String with the keys of the pages of a forget, which is among the purges."""
        return f"{self.prefix}:keys:{number.hex()}"

    @property
    def news(self) -> str:
        """Stream that wakes readers; its entries have no meaning."""
        return f"{self.prefix}:news"

    def record(self, server: str) -> str:
        """String with the sign of life of a server."""
        return f"{self.prefix}:server:{server}"

    def serves(self, server: str) -> str:
        """String with where a server answers requests."""
        return f"{self.prefix}:serves:{server}"

    def pages(self, server: str, sequence: int) -> str:
        """String with the pages of a server as of a sequence number."""
        return f"{self.prefix}:pages:{server}:{sequence}"

    def changes(self, server: str, incarnation: int) -> str:
        """Stream of the changes since then, by sequence number."""
        return f"{self.prefix}:changes:{server}:{incarnation}"
