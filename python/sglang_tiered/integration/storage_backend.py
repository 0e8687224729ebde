"""``TieredStorage``: SGLang's storage interface over a tier engine.

SGLang calls it from its own storage threads (query, prefetch I/O, backup), never from the
scheduler thread, except ``get_stats``, which is memory only. One instance per scheduler process.

Ownership of host pages: SGLang keeps the pages of a call allocated until the call returns, so a
call returns only after the engine has let go of them (engine contract, rule 5). A late write into
a page that was freed and given to another request would be silent corruption.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from sglang_tiered.config import TieredConfig
from sglang_tiered.errors import ConfigError, StoreLockedError
from sglang_tiered.integration import host_pages, namespace
from sglang_tiered.integration.host_ledger import HostLedger
from sglang_tiered.integration.host_pages import engine_keys, page_segments, pool_label
from sglang_tiered.integration.shards import shard_name
from sglang_tiered.integration.store_gate import StoreGate
from sglang_tiered.integration.tier_probe import (
    MAX_PROBE_BYTES,
    MAX_PROBE_PAGES,
    read_in_steps,
)
from sglang_tiered.integration.tier_stats import TierStats, tier_stats
from sglang_tiered.integration.zero_copy import ZeroCopyStorage
from sglang_tiered.storage.base import Health, Run, Stop
from sglang_tiered.storage.region.directory import shard_path
from sglang_tiered.storage.region.store import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.integration.load_planner import LoadPlanner
    from sglang_tiered.storage.base import Job, Page, TierEngine
    from sglang_tiered.storage.region.forgetting import Forgetting
    from sglang_tiered.storage.region.notes import Notes

__all__ = ["TieredStorage"]

logger = logging.getLogger(__name__)


class TieredStorage(ZeroCopyStorage):
    """Pages of every registered host pool, in one engine, under one namespace."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        config = TieredConfig.from_environment()
        if config is None or config.nvme is None:
            raise ConfigError(
                "the tiered storage backend has no tier configuration; start the server with "
                "python -m sglang_tiered.launch_server."
            )
        self._config = config
        self._storage_config = storage_config
        # SGLang lets only rank 0 write the replicated KV of an MLA model, for backends that all
        # ranks share. Our shards are private to a rank, so every rank writes its own.
        storage_config.is_mla_model = False
        self._engine: TierEngine | None = None
        self._gate: StoreGate | None = None
        self._namespace = b""
        self._stores_suspended = False
        self._planner: LoadPlanner[Any] | None = None
        self._transfer_lock = threading.Lock()
        self.num_transfers = 0  # calls that have host pages in use; any thread may read it
        self.ledger: HostLedger  # from when the host pools are registered
        self._was_updated = False

    # ---- Life cycle (scheduler thread, no requests running) ----

    def on_host_pools_registered(self) -> None:
        """Open the shard: the identity of the bytes is complete once the pools are known."""
        pools = {PoolName.KV: self.mem_pool_host, **getattr(self, "registered_pools", {})}
        host_pages.check(pools)
        self._namespace = namespace.digest(
            namespace.server_identity(self._storage_config),
            {pool_label(name): namespace.describe_pool(pool) for name, pool in pools.items()},
        )
        self._engine = self._open_shard()
        self.ledger = HostLedger.of_pool(self.mem_pool_host.logical_size, self._page_size())
        writes_per_day = self._config.nvme_writes_per_day_per_rank
        self._gate = StoreGate(
            self._engine,
            host_tokens=self.mem_pool_host.logical_size,
            page_bytes=self.page_bytes(),
            writes_per_day=writes_per_day,
        )
        stats = self._engine.stats()
        logger.info(
            "NVMe tier open: namespace %s, %d pages of earlier runs found, %d of %d bytes in use",
            self._namespace.hex()[:16],
            stats.num_pages,
            stats.physical_bytes,
            stats.capacity_bytes,
        )

    def _open_shard(self) -> RegionEngine:
        """The first free shard of this rank's geometry.

        Plain data parallelism gives every replica the same ranks, so a locked shard is some other
        replica's and the next one is tried; which replica gets which does not matter, because all
        hold KV of the same namespace.
        """
        nvme = self._config.nvme
        assert nvme is not None
        where = self._storage_config
        for replica in range(self._config.num_ranks):
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
                    namespace=self._namespace,
                    capacity_bytes=self._config.nvme_bytes_per_rank,
                    region_bytes=nvme.region_bytes,
                    max_tenant_bytes=self._config.max_tenant_bytes_per_rank,
                )
            except StoreLockedError:
                if replica + 1 == self._config.num_ranks:
                    raise
        raise AssertionError("a server has at least one rank")

    def page_bytes(self) -> int:
        """Payload of one KV page of this rank."""
        pages = page_segments(self.mem_pool_host, torch.arange(self._page_size()), 1)
        return sum(segment.nbytes for segment in pages[0])

    def _page_size(self) -> int:
        return self._storage_config.logical_page_size or int(self.mem_pool_host.page_size)

    def use_planner(self, planner: LoadPlanner[Any]) -> None:
        """Tell ``planner`` of every load from now on, and measure the tier if it holds anything."""
        self._planner = planner
        self.probe([key.hex() for key in self._require_engine().some_keys(MAX_PROBE_PAGES)])

    @property
    def notes(self) -> Notes:
        """Small files beside the pages."""
        engine = self._require_engine()
        assert isinstance(engine, RegionEngine)
        return engine.notes

    def close(self) -> None:
        """Finish running I/O and release the shard. Idempotent."""
        if self._engine is not None:
            self._engine.close()

    def clear(self) -> None:
        """Forget every page of this shard."""
        self._require_engine().clear()

    def change_weights(self, *, tree_was_flushed: bool) -> None:
        """Start a namespace of its own for weights that were replaced in this process.

        If the tree still holds KV of the old weights, stores are refused until it is reset, since
        nothing tells those pages from new ones.
        """
        self._stores_suspended = not tree_was_flushed
        self._namespace = namespace.successor(self._namespace)
        # Nobody can name the namespace of an update again: its space is the first to be reused.
        self.region_engine.set_namespace(self._namespace, keep=not self._was_updated)
        self._was_updated = True
        logger.info("weights changed: NVMe tier continues as namespace %s", self._namespace.hex())

    @property
    def region_engine(self) -> RegionEngine:
        assert isinstance(self._engine, RegionEngine), "SGLang has not registered its host pools"
        return self._engine

    def begin_purge(self, tenant: bytes | None) -> Forgetting:
        """Hide the pages of a tenant, or all, and let none on its way land. Memory only."""
        with self.gate.lock:
            self.gate.purge(tenant)
            return self.region_engine.begin_purge(tenant)

    def tree_was_reset(self) -> None:
        """No page of an earlier state is left in the tree: stores are safe again."""
        self._stores_suspended = False
        if self._gate is not None:
            self._gate.tree_was_reset()

    @property
    def gate(self) -> StoreGate:
        """Admission, for the scheduler thread to announce what it queues."""
        assert self._gate is not None, "SGLang registers the host pools before it queues a store"
        return self._gate

    # ---- Queries (any thread, memory only) ----

    def holds(self, page_hash: str) -> bool:
        """Whether a KV page is stored, or about to be."""
        stop = self._require_engine().lookup(engine_keys(PoolName.KV, [page_hash])).stop
        return stop in (Stop.END, Stop.PENDING)

    def lookup_leading(self, hashes: Sequence[str]) -> int:
        """Leading KV pages a load could serve now; for the scheduler thread."""
        return self._require_engine().lookup(engine_keys(PoolName.KV, hashes)).num_hits

    @property
    def serves_loads(self) -> bool:
        """Whether waiting for a load can still pay off."""
        return self._require_engine().stats().health is Health.RUNNING

    def stats(self) -> TierStats:
        return tier_stats(self._require_engine().stats(), self.gate, self.ledger, self._planner)

    def get_stats(self) -> None:
        """SGLang's per-step statistics hook; ours are exported by ``metrics``."""
        return

    def exists(self, key: str) -> bool:
        return self.lookup_leading([key]) == 1

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self.lookup_leading(keys)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that KV and every other pool can restore together.

        ALL_PAGES pools must hold every page of the prefix, TRAILING_PAGES pools (SWA windows,
        Mamba states) its last ``len(transfer.keys)`` pages.
        """
        kv_pages = self.lookup_leading(keys)
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            held = self._held(transfer.name, keys[:kv_pages])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                window = kv_pages
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
            else:
                raise ValueError(
                    f"pool {transfer.name} has hit policy {transfer.hit_policy}, which the tiered "
                    "storage does not serve; start with --tier-mode host."
                )
            covered = {
                end for end in range(1, kv_pages + 1) if all(held[max(0, end - window) : end])
            }
            if covered:
                hits[transfer.name] = max(covered)
            restorable = [end for end in restorable if end in covered]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _held(self, pool: PoolName, hashes: Sequence[str]) -> list[bool]:
        engine = self._require_engine()
        return [engine.lookup([key]).num_hits == 1 for key in engine_keys(pool, hashes)]

    # ---- Transfers (SGLang's storage threads; return once the engine let go of the pages) ----

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,  # [pages * page_size] int64
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._load(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,  # [pages * page_size] int64
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._store(PoolName.KV, keys, host_indices)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {t.name: self._load(t.name, t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {t.name: self._store(t.name, t.keys or [], t.host_indices) for t in transfers}

    def _load(
        self, pool: PoolName, hashes: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[bool]:
        if not hashes or host_indices is None:
            return [False] * len(hashes)
        pages = page_segments(self._pool(pool), host_indices, len(hashes))
        return self._timed_load(pool, hashes, pages)

    def _timed_load(
        self,
        pool: PoolName,
        hashes: Sequence[str],
        pages: tuple[Page, ...],
        taught_after_s: float = 0.0,
    ) -> list[bool]:
        """Read pages; the planner learns from it if it takes ``taught_after_s`` or longer."""
        begun = time.monotonic()
        run = Run(tuple(engine_keys(pool, hashes)), pages)
        reading = None if self._planner is None else self._planner.begin_read(run.num_bytes)
        served = self._finish(self._begin(self._require_engine().submit_load, run))
        if self._planner is not None and reading is not None:
            is_lesson = time.monotonic() - begun >= taught_after_s
            self._planner.end_read(reading, is_complete=all(served) and is_lesson)
        return served

    def probe(self, hashes: Sequence[str]) -> None:
        """Measure the tier with pages it holds, into other memory, on a thread of its own."""
        hashes = hashes[: max(1, min(MAX_PROBE_PAGES, MAX_PROBE_BYTES // self.page_bytes()))]
        if hashes:
            threading.Thread(
                target=self._probe, args=(hashes,), name="tier-probe", daemon=True
            ).start()

    def _probe(self, hashes: Sequence[str]) -> None:
        page_bytes = self.page_bytes()
        pages = tuple((memoryview(bytearray(page_bytes)),) for _ in hashes)

        def read(num_pages: int, taught_after_s: float) -> None:
            taken = slice(num_pages)
            self._timed_load(PoolName.KV, hashes[taken], pages[taken], taught_after_s)

        read_in_steps(read, len(hashes))

    def _store(
        self, pool: PoolName, hashes: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[bool]:
        """A page that admission drops is a False like any other: SGLang leaves out the rest of the
        operation, which would be of no use without it, and goes on."""
        if not hashes or host_indices is None:
            return [False] * len(hashes)
        is_kv = pool == PoolName.KV
        suspended, stored = self._stores_suspended, []
        job = None
        with self.gate.lock:
            admitted = 0 if suspended else self.gate.num_admitted(hashes, is_kv=is_kv)
            if admitted:
                pages = page_segments(self._pool(pool), host_indices, len(hashes))[:admitted]
                run = Run(tuple(engine_keys(pool, hashes[:admitted])), pages, self.gate.tenant)
                job = self._begin(self._require_engine().submit_store, run)
        if job is not None:
            stored = self._finish(job)
        stored += [False] * (len(hashes) - admitted)
        if is_kv:
            why = None if suspended else self.gate.dropped_as
            self.ledger.stored(host_indices, stored, admitted, why)
        return stored

    def _begin(self, submit: Callable[[Run], Job], run: Run) -> Job:
        with self._transfer_lock:
            self.num_transfers += 1
        return submit(run)

    def _finish(self, job: Job) -> list[bool]:
        job.wait()
        with self._transfer_lock:
            self.num_transfers -= 1
        self._require_engine().poll()  # every caller waits for its own job: no reports needed
        return job.ok

    def _pool(self, name: PoolName) -> Any:
        return self.mem_pool_host if name == PoolName.KV else self.registered_pools[name]

    def _require_engine(self) -> TierEngine:
        assert self._engine is not None, "SGLang registers the host pools before it transfers"
        return self._engine
