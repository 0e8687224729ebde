"""Servers over their own NVMe that hear of each other's erasures, in one process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bucket_engines import open_engine
from peer_servers import quick
from simulation.engine import REGION

from kit.runs import NAMESPACE
from sglang_tiered.sharing.peer_tier import PeerTier
from sglang_tiered.sharing.settings import Target
from sglang_tiered.storage.base import Erasure, Tier, TierEngine
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.stack import TierStack

if TYPE_CHECKING:
    from concurrent.futures import Future
    from contextlib import ExitStack
    from pathlib import Path


class Servers:
    """With these tiers beyond NVMe: a bucket that all have, or each other, at the addresses in each
    one's roster. ``told``: what any heard from the bucket."""

    def __init__(self, directory: Path, opened: ExitStack, *beyond: Tier) -> None:
        self._directory = directory
        self._opened = opened
        self._beyond = beyond
        self.rosters: dict[str, list[Target]] = {"one": [], "other": []}
        self.ports: dict[str, int] = {}
        self.told: list[Erasure] = []

    def open(self, name: str, *, behind_s: float = 0.0, namespace: bytes = NAMESPACE) -> TierStack:
        nvme = RegionEngine(
            self._directory / name,
            namespace=namespace,
            capacity_bytes=64 * REGION,
            region_bytes=4 * REGION,
            num_threads=2,
        )
        told: list[TierStack] = []
        remote: list[TierEngine] = []
        if Tier.PEER in self._beyond:
            roster = self.rosters.setdefault(name, [])
            settings = quick(roster, listen_port=self.ports.get(name, 0), expiry_s=5.0)

            def erase(what: Erasure) -> Future[bool]:
                return told[0].erase(what)

            peers = PeerTier(settings, namespace=namespace, region=nvme, erase=erase)
            self.ports[name] = peers.port
            remote.append(peers)
        if Tier.OBJECT in self._beyond:
            url = (self._directory / "bucket").as_uri()
            wall_clock = lambda: time.time() - behind_s  # noqa: E731
            remote.append(open_engine(url, namespace=namespace, wall_clock=wall_clock))

        def on_told(what: Erasure) -> Future[bool]:
            self.told.append(what)
            return (told or [nvme])[0].erase(what)

        stack = TierStack(nvme, remote, on_told=on_told)
        told.append(stack)
        self._opened.callback(stack.close)
        return stack

    def connect(self) -> None:
        for name, roster in self.rosters.items():
            roster[:] = [Target("127.0.0.1", port) for n, port in self.ports.items() if n != name]

    def cut(self) -> None:
        for roster in self.rosters.values():
            roster.clear()
