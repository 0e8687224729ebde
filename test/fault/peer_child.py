"""A server that shares its pages: a store and its peer tier, which finds others by a roster."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from page_peers import HOST, NAMESPACE
from peer_servers import quick

from kit.waiting import eventually
from sglang_tiered.sharing.peer_tier import PeerTier
from sglang_tiered.sharing.settings import Target
from sglang_tiered.storage.region import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MiB = 1 << 20


class Sharer(NamedTuple):
    region: RegionEngine
    tier: PeerTier


@contextmanager
def sharer(
    roster: list[Target], directory: Path, *, namespace: bytes = NAMESPACE
) -> Iterator[Sharer]:
    region = RegionEngine(
        directory, namespace=namespace, capacity_bytes=256 * MiB, region_bytes=32 * MiB
    )
    tier = PeerTier(quick(roster), namespace=namespace, region=region, erase=region.erase)
    target = Target(HOST, tier.port)
    roster.append(target)
    try:
        yield Sharer(region, tier)
        eventually(lambda: not tier.stats().num_inflight_jobs)
        tier.check_integrity()
    finally:
        roster.remove(target)
        tier.close()
        region.close()
