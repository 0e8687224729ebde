"""Calls of the clients of the tiers, which answer alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from sglang_tiered.client import AsyncTierClient, TierClient

KINDS = ("sync", "async")


def call(
    kind: str, url: str, name: str, /, *given: Any, of: dict[str, Any] | None = None, **named: Any
) -> Any:
    """The answer of one call, or a list of its pieces, by a client with the settings ``of``."""
    if kind == "sync":
        with TierClient(url, **of or {}) as client:
            found = getattr(client, name)(*given, **named)
            return list(found) if isinstance(found, Iterator) else found

    async def run() -> Any:
        async with AsyncTierClient(url, **of or {}) as client:
            found = getattr(client, name)(*given, **named)
            if isinstance(found, AsyncIterator):
                return [piece async for piece in found]
            return await found

    return asyncio.run(run())
