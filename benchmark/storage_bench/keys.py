"""Keys of chains, the same in every process that makes them."""

from __future__ import annotations

import hashlib


def make_keys(chain: str, num_pages: int, first: int = 0) -> tuple[bytes, ...]:
    """The keys of a chain's pages, 32 bytes each; SGLang's own are SHA-256 as well."""
    return tuple(
        hashlib.sha256(f"{chain}/{number}".encode()).digest()
        for number in range(first, first + num_pages)
    )
