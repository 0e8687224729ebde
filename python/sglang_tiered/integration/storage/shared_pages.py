"""Ranks with the same pages: one of them on each machine keeps them, and lends to the others.

Latent attention (MLA) has one vector per token instead of the keys and values of many heads, and
every rank of tensor parallelism computes all of it. The lowest rank on a machine opens the tiers as
a server of one rank would. Its shard, its namespace and its part of the limits do not say how many
ranks there are, so a server with another ``--tp-size`` finds the same pages. The others open
nothing (``sharing.lending``).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.identity import namespace
from sglang_tiered.storage.region.directory import max_regions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from sglang_tiered.config import TieredConfig


_SAME_ON_ALL_RANKS = (MLATokenToKVPoolHost, DSAIndexerPoolHost)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def are_pages_same(
    where: HiCacheStorageConfig, pools: Iterable[Any], *, is_replicated: bool
) -> bool:
    """Whether all ranks of tensor parallelism hold the same bytes in every pool; all ranks get the
    same answer. ``is_replicated``: what SGLang says of the model. A draft model's pool is not yet
    known when the tiers are opened."""
    return (
        is_replicated
        and where.tp_size > 1
        and where.attn_cp_size == where.dcp_size == 1
        and all(type(pool) in _SAME_ON_ALL_RANKS for pool in pools)
        and not namespace.has_draft()
    )


def claim_of(found: bytes, *, is_nameless: bool, num_updates: int) -> bytes:
    """Return what a rank takes its shared pages to be, for the others to compare with theirs.
    Weights without a name, and those changed in a running server, are the same on all its
    ranks."""
    return b"nameless %d" % num_updates if num_updates or is_nameless else found


def gather_over_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks that share pages, by rank. Every one of them must call it, in
    the same step; waits for the last."""
    from sglang.srt.runtime_context import get_parallel

    gathered: list[Any] = get_parallel().attn_tp_group.all_gather_object(value)
    return gathered


class SharingRanks:
    """Knows the ranks that share pages with this one. Every one of them must make one and then call
    ``meet``: both wait for the last."""

    def __init__(self, rank: int, directory: Path) -> None:
        places = gather_over_ranks(_place(directory))
        self._here = [other for other, place in enumerate(places) if place == places[rank]]
        self.is_lender = rank == self._here[0]

    def settings(
        self, config: TieredConfig, where: HiCacheStorageConfig
    ) -> tuple[TieredConfig, HiCacheStorageConfig]:
        """Return the lender's settings: those of a server with one rank, instead of these."""
        num_here = len(self._here)
        num_ranks = max(1, config.num_ranks // num_here)
        config = msgspec.structs.replace(config, num_ranks=num_ranks, tp_size=1)
        nvme = config.nvme
        assert nvme is not None
        if config.most_nvme_bytes_per_rank // nvme.region_bytes > max_regions():
            # The launcher chose a size of which each rank could have its part open.
            nvme = msgspec.structs.replace(nvme, region_bytes=num_here * nvme.region_bytes)
            config = msgspec.structs.replace(config, nvme=nvme)
        return config, dataclasses.replace(where, tp_rank=0, tp_size=1)

    def meet(self, open_tiers: Callable[[], Path | None]) -> Path:
        """Open the tiers here, which of a lender returns its shard, and hear of the others; returns
        the shard of this machine's lender. Raises what ``open_tiers`` does, and ``ConfigError``
        where that of another rank failed: all ranks have the tiers or none."""
        shard: Path | None = None
        failure: str | None = "it was interrupted"
        try:
            shard, failure = open_tiers(), None
        except Exception as error:
            failure = str(error)
            raise
        finally:
            opened = gather_over_ranks((shard, failure))
        for rank, (_, failure) in enumerate(opened):
            if failure is not None:
                raise ConfigError(f"rank {rank} could not open the tiers: {failure}")
        lenders: Path = opened[self._here[0]][0]
        return lenders


def _place(directory: Path) -> tuple[str, int, int]:
    """Return what is equal for processes of one machine that see the same tier directory."""
    try:
        found = os.stat(directory)
        return _BOOT_ID.read_text(), found.st_dev, found.st_ino
    except OSError as error:  # the opening of the tiers will say so, when all ranks listen
        return str(error), os.getpid(), 0
