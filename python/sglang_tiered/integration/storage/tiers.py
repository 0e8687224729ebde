"""Opens the tiers of one scheduler process: its shard on NVMe, its namespace in the bucket, and
its part in sharing with other servers."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE

from sglang_tiered.codecs import LOSSY_CODEC_NAMES
from sglang_tiered.config import MIN_REGIONS, MIN_REGIONS_PER_DAY
from sglang_tiered.errors import ConfigError, StoreLockedError
from sglang_tiered.flags import format_bytes
from sglang_tiered.integration.identity.namespace_search import recall_namespace
from sglang_tiered.integration.storage.machine_budget import MachineBudget
from sglang_tiered.integration.storage.shards import is_of_other_sharing, num_replicas, shard_name
from sglang_tiered.storage.base import Tier
from sglang_tiered.storage.encoding import PageEncoding
from sglang_tiered.storage.region.directory import remove_shards, shard_path
from sglang_tiered.storage.region.engine import DEFAULT_QUEUED_STORE_BYTES, RegionEngine
from sglang_tiered.storage.region.format import min_region_bytes
from sglang_tiered.storage.stack import TierStack
from sglang_tiered.storage.stack.demotion import StackSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from typing import Any

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from sglang_tiered.codecs import PageLayout
    from sglang_tiered.config import TieredConfig
    from sglang_tiered.remote_config import PeerConfig
    from sglang_tiered.sharing.peer_tier import PeerTier
    from sglang_tiered.sharing.settings import PeerSettings
    from sglang_tiered.storage.base import Erasure, TierEngine
    from sglang_tiered.storage.bucket import BucketEngine


logger = logging.getLogger(__name__)

QUEUED_PAGES = 2 * STORAGE_BATCH_SIZE
"""The queue holds what SGLang stores in one call and as much of others, however large a page."""

SMALL_PAGE_BYTES = 1 << 20
"""Smaller pages cost many requests to a bucket."""

PROMOTED_PAGES = 8
"""So many pages from remote tiers may wait in memory for NVMe, however large one is."""


def open_shard(
    config: TieredConfig,
    where: HiCacheStorageConfig,
    namespace: bytes | None,
    page_bytes: int,
    layout: PageLayout,
    *,
    tp_size: int,
) -> tuple[RegionEngine, int, MachineBudget | None]:
    """Open the first free shard of this rank's geometry, without a namespace under the last one
    that was found for it. Return it, its number among them, and its part of the machine's budget.
    ``page_bytes`` is the largest page of any pool; raises ``ConfigError`` where the tier is too
    small for it. ``layout`` is that of the KV pool. ``tp_size`` is the server's, also where
    ``where`` stands for all of its ranks.

    Plain data parallelism gives every replica the same ranks, so a locked shard is some other
    replica's and the next one is tried. Which replica gets which does not matter, because all hold
    KV of the same namespace.
    """
    nvme = config.nvme
    assert nvme is not None
    tiers = (Tier.NVME,) if config.object is None else (Tier.NVME, Tier.OBJECT)
    encoding = PageEncoding(nvme.codec, layout, tiers=tiers)
    region_bytes = _region_bytes(config, nvme.region_bytes, page_bytes)
    replicas = num_replicas(
        config.num_ranks, tp_size=where.tp_size, pp_size=where.pp_size, dp_size=config.dp_size
    )
    for replica in range(replicas):
        name = shard_name(
            tp_rank=where.tp_rank,
            tp_size=where.tp_size,
            pp_rank=where.pp_rank,
            pp_size=where.pp_size,
            dp_rank=where.dp_rank,
            replica=replica,
        )
        path = shard_path(Path(nvme.directory), name)
        if where.tp_rank == 0 and tp_size > 1:
            _remove_other_sharing(Path(nvme.directory), name, tp_size)
        budget = None
        try:
            capacity, most = config.nvme_bytes_per_rank, config.most_nvme_bytes_per_rank
            if nvme.budget_directory is not None:
                budget = MachineBudget(
                    Path(nvme.budget_directory),
                    path,
                    total_bytes=most,
                    floor_bytes=capacity,
                    region_bytes=region_bytes,
                )
                capacity = budget.capacity_bytes
            share = nvme.tenant_share
            engine = RegionEngine(
                path,
                namespace=namespace or recall_namespace(path),
                capacity_bytes=capacity,
                most_bytes=most,
                region_bytes=region_bytes,
                max_queued_store_bytes=max(DEFAULT_QUEUED_STORE_BYTES, QUEUED_PAGES * page_bytes),
                max_tenant_bytes=None if share is None else int(capacity * share),
                encoding=encoding,
            )
            if budget is not None:
                budget.start(engine.capacity)
            return engine, replica, budget
        except BaseException as error:
            if budget is not None:
                budget.leave()
            if not isinstance(error, StoreLockedError) or replica + 1 == replicas:
                raise
    raise AssertionError("a server has at least one scheduler with these ranks")


def _remove_other_sharing(directory: Path, opened: str, tp_size: int) -> None:
    """Remove the shards of a model whose ranks share pages where those of this one do not, or the
    reverse: the launcher cannot tell, and no cap counts them. The launcher holds the directory."""

    def keep(name: str) -> bool:
        return not is_of_other_sharing(name, opened=opened, tp_size=tp_size)

    for name in remove_shards(directory, keep=keep):
        logger.info("removed shard %s of %s (this model does not read it)", name, directory)


def _region_bytes(config: TieredConfig, configured: int, page_bytes: int) -> int:
    """Return the configured size, or what a page needs. Raises ``ConfigError`` where the bounds
    then hold too few regions: the tier would silently take no page."""
    region_bytes = min_region_bytes(page_bytes)
    if region_bytes <= configured:
        return configured
    bounds = {
        "--tier-nvme-bytes"
        if config.nvme is None or config.nvme.floor_bytes is None
        else "--tier-nvme-floor": (config.nvme_bytes_per_rank, MIN_REGIONS),
        "--tier-tenant-share": (config.max_tenant_bytes_per_rank, MIN_REGIONS),
        "--tier-nvme-writes-per-day": (config.nvme_writes_per_day_per_rank, MIN_REGIONS_PER_DAY),
    }
    for flag, (nbytes, num_regions) in bounds.items():
        if nbytes is not None and nbytes < num_regions * region_bytes:
            raise ConfigError(
                f"{flag} leaves a rank {format_bytes(nbytes)}, which is too small for pages of "
                f"{format_bytes(page_bytes)}: it must hold {num_regions} regions of "
                f"{format_bytes(region_bytes)}; raise it, lower --page-size, or pass --tier-mode "
                "host."
            )
    return region_bytes


def open_remote_tiers(
    config: TieredConfig,
    shard: RegionEngine,
    namespace: bytes,
    host_pool: Any,
    *,
    rank: int,
    page_bytes: int,
    may_promote: Callable[[], bool],
    order: Callable[[], Sequence[Tier]],
    on_told: Callable[[Erasure], Future[bool]],
) -> TierStack:
    """Open the tiers beyond the shard. Returns at once: they are contacted in the background, and
    miss until they answer. ``rank`` is this process's among those of the server,
    ``page_bytes`` the largest page of any pool. ``on_told`` erases what another server did."""
    bucket = _open_object_tier(config, namespace, shard.encoding)
    if bucket is not None and rank == 0 and page_bytes < SMALL_PAGE_BYTES:
        logger.info(
            "each page of %s is a request to the bucket, %d for a GiB; --page-size %d makes it %s",
            format_bytes(page_bytes),
            (1 << 30) // page_bytes,
            host_pool.page_size * -(-SMALL_PAGE_BYTES // page_bytes),
            format_bytes(page_bytes * -(-SMALL_PAGE_BYTES // page_bytes)),
        )
    remote: list[TierEngine] = []
    if config.peers is not None:
        try:
            remote.append(_open_peers(config, rank, shard, namespace, on_told))
        except BaseException:
            if bucket is not None:
                bucket.close()
            raise
    if bucket is not None:
        remote.append(bucket)
    bounds = StackSettings()
    promotion_bytes = max(bounds.promotion_bytes, PROMOTED_PAGES * page_bytes)
    bounds = dataclasses.replace(bounds, promotion_bytes=promotion_bytes)
    return TierStack(shard, remote, bounds, order=order, may_promote=may_promote, on_told=on_told)


def _open_object_tier(
    config: TieredConfig, namespace: bytes, encoding: PageEncoding | None
) -> BucketEngine | None:
    bucket = config.object_of_rank
    if bucket is None:
        return None
    # Imported late: without an object tier its libraries are not needed.
    from sglang_tiered.storage.bucket import BucketEngine

    engine = BucketEngine(bucket, namespace=namespace, encoding=encoding)
    logger.info("object tier open at %s: namespace %s", bucket.url, namespace.hex()[:16])
    return engine


def _open_peers(
    config: TieredConfig,
    rank: int,
    shard: RegionEngine,
    namespace: bytes,
    on_told: Callable[[Erasure], Future[bool]],
) -> PeerTier:
    # Imported late: without other servers its libraries are not needed.
    from sglang_tiered.sharing.peer_tier import PeerTier

    assert config.peers is not None
    return PeerTier(
        peer_settings(config.peers, rank, config.num_ranks, config.tp_size),
        namespace=namespace,
        region=shard,
        erase=on_told,
    )


def lossy_codec(config: TieredConfig) -> str | None:
    """Return the codec that changes KV on its way through the tiers; None where KV is unchanged.
    Its name belongs into the namespace of every tier: more KV is computed from what comes back."""
    if config.nvme is None or config.nvme.codec not in LOSSY_CODEC_NAMES:
        return None
    return config.nvme.codec


def peer_settings(
    config: PeerConfig, rank: int, num_ranks: int = 1, tp_size: int = 1
) -> PeerSettings:
    """Return the settings of one rank, which is a peer of its own: it follows those ranks of other
    servers that may hold the same pages. Raises ``ConfigError`` for values that cannot work."""
    # Imported late: without other servers its libraries are not needed.
    from sglang_tiered.sharing.settings import PeerSettings, parse_index_url, parse_targets

    last = max(num_ranks, rank + 1)
    return PeerSettings(
        peers=() if config.servers is None else parse_targets(config.servers),
        ports=tuple(range(rank % tp_size, last, tp_size)),
        index=None if config.url is None else parse_index_url(config.url),
        listen_host=config.host,
        listen_port=0 if config.port is None else config.port + rank,
        keys_directory=config.keys_directory,
    )
