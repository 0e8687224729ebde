"""Opens the tiers of one scheduler process: its shard on NVMe, and its namespace in the bucket."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.errors import StoreLockedError
from sglang_tiered.integration.object_args import object_settings
from sglang_tiered.integration.shards import shard_name
from sglang_tiered.storage.layered import LayeredEngine
from sglang_tiered.storage.region.directory import shard_path
from sglang_tiered.storage.region.store import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.bucket_collector import BucketCollector

__all__ = ["ObjectTier", "open_object_tier", "open_shard"]

logger = logging.getLogger(__name__)


class ObjectTier(NamedTuple):
    """The whole with the object tier in it, and what keeps the bucket in bounds."""

    engine: LayeredEngine
    collector: BucketCollector

    def close(self) -> None:
        self.collector.close()
        self.engine.close()


def open_shard(config: TieredConfig, where: HiCacheStorageConfig, namespace: bytes) -> RegionEngine:
    """The first free shard of this rank's geometry.

    Plain data parallelism gives every replica the same ranks, so a locked shard is some other
    replica's and the next one is tried; which replica gets which does not matter, because all
    hold KV of the same namespace.
    """
    nvme = config.nvme
    assert nvme is not None
    for replica in range(config.num_ranks):
        name = shard_name(
            tp_rank=where.tp_rank,
            tp_size=where.tp_size,
            pp_rank=where.pp_rank,
            pp_size=where.pp_size,
            dp_rank=where.dp_rank,
            replica=replica,
        )
        try:
            return RegionEngine(
                shard_path(Path(nvme.directory), name),
                namespace=namespace,
                capacity_bytes=config.nvme_bytes_per_rank,
                region_bytes=nvme.region_bytes,
                max_tenant_bytes=config.max_tenant_bytes_per_rank,
            )
        except StoreLockedError:
            if replica + 1 == config.num_ranks:
                raise
    raise AssertionError("a server has at least one rank")


def open_object_tier(
    config: TieredConfig,
    shard: RegionEngine,
    namespace: bytes,
    host_pool: Any,
    may_promote: Callable[[], bool],
) -> ObjectTier | None:
    """The shard with the object tier below it; None where none was asked for. Returns at once:
    the bucket is looked at in the background, and until it answers the tier only misses."""
    settings = object_settings(config)
    if settings is None or config.object is None:
        return None
    # Only here: who has no object tier needs none of its libraries.
    from sglang_tiered.integration.bucket_collector import BucketCollector
    from sglang_tiered.integration.page_layout import page_layout
    from sglang_tiered.storage.codecs import NO_CODEC, make_codec
    from sglang_tiered.storage.object import ObjectEngine

    codec = None
    if settings.codec != NO_CODEC:
        codec = make_codec(settings.codec, page_layout(host_pool))
    engine = ObjectEngine(settings, namespace=namespace, page_codec=codec)
    logger.info("object tier at %s, namespace %s", config.object.shown_url, namespace.hex()[:16])
    layered = LayeredEngine(shard, engine, may_promote=may_promote)
    return ObjectTier(layered, BucketCollector(settings, engine.namespace))
