"""``WarmList``: the prefixes worth having in host memory right after a restart.

The tree and its recency die with the process; NVMe keeps pages by their hashes, from which prompts
cannot be told. So the prompts that came back lately are remembered, most recent first, up to half
of the host tier, and written beside the pages. The file is as private as the pages are: it holds
tokens, and digests in place of keys. It is read back only if every byte verifies.

Not thread-safe, except for ``encode``, which works on what ``snapshot`` returned.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.checksummed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["WarmChain", "WarmList", "decode", "encode"]

VERSION = 2


class WarmChain(msgspec.Struct, frozen=True):
    """One prefix: its tokens as int64 in native order, its tenant, and a digest of the keys of its
    requests, of which a tenant has one more for each adapter."""

    tokens: bytes
    tenant: bytes
    keys: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 8

    def token_ids(self) -> array[int]:
        return array("q", self.tokens)


class _WarmFile(msgspec.Struct, frozen=True):
    version: int
    chains: list[WarmChain]


class WarmList:
    """Keeps at most ``capacity`` tokens of chains and drops the least recently used first."""

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise ValueError(f"a warm list of {capacity} tokens remembers nothing")
        self._capacity = capacity
        self._chains: OrderedDict[str, WarmChain] = OrderedDict()  # by the last page's hash
        self.num_tokens = 0
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._chains)

    def note_chain(self, chain: str, content: WarmChain, *, prefixes: Iterable[str] = ()) -> None:
        """Note the use of a chain. It replaces the chains in ``prefixes``, its own beginnings."""
        for shorter in (*prefixes, chain):
            gone = self._chains.pop(shorter, None)
            if gone is not None:
                self.num_tokens -= gone.num_tokens
        self.num_changes += 1
        if content.num_tokens > self._capacity:
            return
        self._chains[chain] = content
        self.num_tokens += content.num_tokens
        while self.num_tokens > self._capacity:
            _, oldest = self._chains.popitem(last=False)
            self.num_tokens -= oldest.num_tokens

    def drop_chains(self, belongs: Callable[[WarmChain], bool]) -> None:
        """Remove the chains of an erased tenant, so that they are never written again."""
        for chain, content in list(self._chains.items()):
            if belongs(content):
                self.num_tokens -= self._chains.pop(chain).num_tokens
        self.num_changes += 1

    def snapshot(self) -> list[WarmChain]:
        """Return the chains, the most recently used first."""
        return list(reversed(self._chains.values()))


def encode(chains: Sequence[WarmChain]) -> bytes:
    """Return a checksum, then MessagePack."""
    return seal(_WarmFile(VERSION, list(chains)))


def decode(data: bytes) -> list[WarmChain]:
    """Return the encoded chains; none if a byte differs from what was written."""
    file = unseal(data, _WarmFile)
    if file is None or file.version != VERSION:
        return []
    return [] if any(len(chain.tokens) % 8 for chain in file.chains) else file.chains
