"""``TieredStorage``: SGLang's storage interface over a tier engine.

``TieredController`` moves pages through it, and SGLang asks it what the tiers hold. One instance
per scheduler process.

Ownership of host pages: SGLang keeps those of a load or a store until it is told of the end. It is
told when the engine has let go of them (engine contract, rule 5). A late write into a page that was
freed and given to another request would be silent corruption.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from sglang_tiered.config import TieredConfig
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.identity.namespace_search import NamespaceSearch, remember_namespace
from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.integration.storage import host_pages, shared_pages
from sglang_tiered.integration.storage.admission_gate import StoreGate
from sglang_tiered.integration.storage.host_pages import (
    SeenPages,
    check_codec,
    engine_keys,
    page_layout,
    page_segments,
    pool_label,
)
from sglang_tiered.integration.storage.probing import MAX_PROBE_PAGES, probe_tier
from sglang_tiered.integration.storage.queries import TierQueries
from sglang_tiered.integration.storage.remote_erasures import RemoteErasures
from sglang_tiered.integration.storage.tiers import (
    lossy_codec,
    open_remote_tiers,
    open_shard,
)
from sglang_tiered.policy.admission import PageAccounting, store_outcomes
from sglang_tiered.sharing.lending import BorrowedEngine, PageLender
from sglang_tiered.storage.base import REMOTE_TIERS, Erasure, Reason, Run, Stop, Tier
from sglang_tiered.storage.promises import all_true, keep, keep_as, promise
from sglang_tiered.storage.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import torch

    from sglang_tiered.integration.identity.tenants import HiddenPages
    from sglang_tiered.integration.storage.admission_gate import QueuedStore
    from sglang_tiered.integration.storage.machine_budget import BudgetStats, MachineBudget
    from sglang_tiered.integration.storage.probing import ReadPlanner
    from sglang_tiered.integration.storage.shared_pages import SharingRanks
    from sglang_tiered.policy.admission import Outcome
    from sglang_tiered.storage.base import Job, Meter


logger = logging.getLogger(__name__)

NOTE_JOIN_S = 10.0


@dataclass(eq=False)
class BegunStore:
    """Pages that were handed to the tier, or were not admitted. Of the backup thread."""

    job: Job | None  # of the admitted pages; None: there are none
    host_indices: torch.Tensor  # [pages * page_size] int64
    num_pages: int
    num_admitted: int
    why: Outcome | None  # not all were admitted
    counts: bool  # the page accounting hears of the end


class TieredStorage(TierQueries):
    """Stores and loads the pages of every registered host pool, under one namespace.

    SGLang calls ``clear`` for a change of role and to empty device and host memory. It does nothing
    here: stored pages stay valid, and ``/tier/purge`` removes them.

    As long as the namespace is not known (``namespace_search``), every page is a miss and none is
    stored. ``gate.lock`` guards what decides whether a page may be stored, and under which name:
    ``_search``, ``_stores_suspended``, ``_dropping_stores``, ``_namespace``."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        config = TieredConfig.from_environment()
        if config is None or config.nvme is None:
            raise ConfigError(
                "the tiered storage backend has no tier configuration; start the server with "
                "sglang-tiered serve."
            )
        self._config = config
        self._storage_config = storage_config
        # SGLang lets only rank 0 write the replicated KV of an MLA model. ``shared_pages`` decides
        # which ranks write, and those that do not account for it all the same.
        self._is_replicated = bool(storage_config.is_mla_model)
        storage_config.is_mla_model = False
        self._sharing: SharingRanks | None = None  # the ranks that share pages with this one
        self._lender: PageLender | None = None
        self._stack: TierStack | None = None
        self._budget: MachineBudget | None = None
        self.remote_erasures: RemoteErasures | None = None  # where scheduler steps can hide them
        self._gate: StoreGate | None = None
        self._namespace = b""
        self._search: NamespaceSearch | None = None  # while the namespace is not known
        self._noting: threading.Thread | None = None
        self._late: list[tuple[Erasure, Future[bool]]] = []  # to erase when it is
        self._stores_suspended = False  # the tree holds KV of other weights
        self._dropping_stores = False  # memory is about to be emptied
        self._storing: set[Job] = set()  # begun by the backup thread
        self._planner: ReadPlanner | None = None  # is told of every read
        self._seen_pages: SeenPages | None = None  # where anyone copies pages
        # Of what a load's reads are told, by its handle.
        self.meter_of: Callable[[Any], Meter | None] = lambda _: None
        self.accounting: PageAccounting  # from when the host pools are registered
        self.counts_pages = True
        self._num_updates = 0  # of the weights, in this process
        self._is_nameless = False  # no other process will have this namespace

    # ---- Life cycle (scheduler thread, no requests running) ----

    def on_host_pools_registered(self) -> None:
        """Open the shard: the identity of the bytes is complete once the pools are known."""
        pools = {PoolName.KV: self.mem_pool_host, **getattr(self, "registered_pools", {})}
        max_page_bytes = host_pages.check(pools)
        where, pages = self._storage_config, pools.values()
        if not shared_pages.are_pages_same(where, pages, is_replicated=self._is_replicated):
            self._open(pools, max_page_bytes)
            return
        # Alike on all ranks up to here; from here on every one of them comes to the meeting.
        assert self._config.nvme is not None
        directory = Path(self._config.nvme.directory)
        self._sharing = shared_pages.SharingRanks(where.tp_rank, directory)
        try:
            shard = self._sharing.meet(lambda: self._open(pools, max_page_bytes))
        except BaseException:
            self.close()
            raise
        if isinstance(self.region_engine, BorrowedEngine):
            self.region_engine.open(shard)
            logger.info("NVMe tier: shares the pages of %s", shard)

    def _open(self, pools: dict[PoolName, Any], max_page_bytes: int) -> Path | None:
        """Returns the shard whose pages are lent to other ranks, if they are."""
        config, where, sharing = self._config, self._storage_config, self._sharing
        if sharing is not None:
            config, where = sharing.settings(config, where)
        nvme = config.nvme
        assert nvme is not None
        identity = namespace.server_identity(where)
        codec = lossy_codec(config)
        if codec is not None:
            check_codec(codec, pools)
            identity["lossy_codec"] = codec
        if received := namespace.received_identity(config.transfer):
            identity["received"] = received
        search = self._search = NamespaceSearch(  # which ``close`` stops if the tiers do not open
            identity,
            {pool_label(name): namespace.describe_pool(pool) for name, pool in pools.items()},
            Path(nvme.directory),
        )
        if sharing is not None and not sharing.is_lender:
            self._use_borrowed(search)
            return None
        region, replica, self._budget = open_shard(
            config,
            where,
            search.guess,
            max_page_bytes,
            page_layout(self.mem_pool_host),
            tp_size=self._storage_config.tp_size,
        )
        self._stack = TierStack(region)  # which is closed if the others do not open
        self._namespace = region.namespace
        # An answer may have come since; where it is another, the next step takes it.
        self._search = None if search.answer == self._namespace else search
        self._is_nameless = search.is_nameless
        self._keep_books(writes_per_day=config.nvme_writes_per_day_per_rank)
        gate = self.gate
        self._stack = open_remote_tiers(
            config,
            region,
            self._namespace,
            self.mem_pool_host,
            rank=(where.dp_rank + replica) * where.tp_size + where.tp_rank,
            page_bytes=max_page_bytes,
            may_promote=lambda: gate.takes_everything,
            order=lambda: REMOTE_TIERS if self._planner is None else self._planner.far_order(),
            on_told=self.remote_erasures or self.erase,
        )
        if self.stack.remote:
            self._seen_pages = SeenPages(self.mem_pool_host, self._page_size())
            region.use_memory(self._seen_pages)
        if self.knows_namespace:
            if search.is_nameless:
                self.stack.set_namespace(self._namespace)  # of which nothing goes down
            self._collect()
        if self.knows_namespace and not search.is_nameless:
            self._remember_namespace()
        stats = region.stats()
        logger.info(
            "NVMe tier open: namespace %s, %d pages of earlier runs found, %d of %d bytes in use",
            self._namespace.hex()[:16],
            stats.num_pages,
            stats.physical_bytes,
            stats.capacity_bytes,
        )
        if sharing is None:
            return None
        self._lender = PageLender(
            region.directory, self._begin_for_others, lambda: self.stack.generation
        )
        self._set_claim()
        return region.directory

    def _use_borrowed(self, search: NamespaceSearch) -> None:
        """Open no tiers: another rank keeps the pages of this one."""
        self._stack = TierStack(BorrowedEngine())
        answer = search.answer  # which may come at any moment
        self._namespace = answer or b""
        self._search = search if answer is None else None
        self._is_nameless = search.is_nameless
        self._keep_books(writes_per_day=None)
        self._set_claim()

    def _keep_books(self, *, writes_per_day: int | None) -> None:
        self.accounting = PageAccounting(self.mem_pool_host.logical_size, self._page_size())
        self._gate = StoreGate(
            self.region_engine,
            host_tokens=self.mem_pool_host.logical_size,
            page_bytes=self.page_bytes(),
            writes_per_day=writes_per_day,
        )
        # With a pipeline only the tiers are told: its stages would hide at different times.
        has_remote = self._config.peers is not None or self.has_object_tier
        if has_remote and self._storage_config.pp_size == 1:
            self.remote_erasures = RemoteErasures(self._gate, self.erase)

    def _set_claim(self, *, changing: bool = False) -> None:
        """State what the pages are of. ``changing``: it is about to change, so state nothing."""
        claim = None
        if self.knows_namespace and not changing:
            claim = shared_pages.claim_of(
                self._namespace, is_nameless=self._is_nameless, num_updates=self._num_updates
            )
        if self._lender is not None:
            self._lender.set_claim(claim)
        elif isinstance(self.region_engine, BorrowedEngine):
            self.region_engine.claim = claim

    @property
    def borrows(self) -> bool:
        """Whether another rank keeps the pages of this one, and knows which there are."""
        return isinstance(self.region_engine, BorrowedEngine)

    @property
    def budget(self) -> BudgetStats | None:
        """Return this shard's part of the machine's budget, if it has one."""
        return None if self._budget is None else self._budget.stats()

    def page_bytes(self, pool: PoolName = PoolName.KV) -> int:
        """Return the payload bytes of one page of this rank."""
        return host_pages.page_bytes(self._pool(pool))

    def _page_size(self) -> int:
        return self._storage_config.logical_page_size or int(self.mem_pool_host.page_size)

    def use_planner(self, planner: ReadPlanner) -> None:
        """Tell ``planner`` of every read from now on, and measure NVMe if it holds anything."""
        self._planner = planner

        def begins(tier: Tier, num_bytes: int) -> Callable[[Job], None]:
            reading = planner.begin_read(num_bytes, tier)
            return lambda job: planner.end_read(reading, is_complete=all(job.ok))

        self.stack.observe(begins)
        self.probe_tier([key.hex() for key in self.stack.nvme.some_keys(MAX_PROBE_PAGES)])

    def probe_tier(self, hashes: Sequence[str], tier: Tier = Tier.NVME) -> None:
        """Have the planner measure a tier with KV pages that it holds."""
        assert self._planner is not None
        probe_tier(self.stack, self._planner, self.page_bytes(), hashes, tier)

    @property
    def namespace(self) -> bytes:
        """What servers that share pages have in common; empty until the weights were read."""
        return self._namespace if self.knows_namespace else b""

    def settle_namespace(self) -> None:
        """Use the tiers from now on if the weights have been read. Memory only.

        Ranks need not do so in the same step. Plans and hits are reduced over ranks, so no rank
        loads what one of them does not find, and each stores for itself.
        """
        search = self._search
        if search is None or search.answer is None:
            return
        with self.gate.lock:
            if search.is_nameless or search.answer != self._namespace:
                self._namespace = search.answer
                self.stack.set_namespace(self._namespace, is_nameless=search.is_nameless)
            self._search = None  # from now on pages are found
            self._is_nameless = search.is_nameless
            self._set_claim()
            self._erase_late()
        self._collect()
        if not search.is_nameless:
            self._remember_namespace()
        logger.info("NVMe tier: weights are known, namespace %s", self._namespace.hex()[:16])

    def _collect(self) -> None:
        """Keep the bucket in bounds from now on: the namespace is known."""
        if self.stack.bucket is not None:
            self.stack.bucket.start_collecting()

    def _remember_namespace(self) -> None:
        region = self.region_engine
        if isinstance(region, BorrowedEngine):
            return  # the lender does
        pools = {PoolName.KV: self.mem_pool_host, **getattr(self, "registered_pools", {})}
        arguments = (region, self._namespace, host_pages.kv_page_size(pools))
        self._noting = threading.Thread(
            target=remember_namespace, args=arguments, name="tier-namespace", daemon=True
        )
        self._noting.start()

    def close(self) -> None:
        """Finish running I/O and release the shard. Idempotent."""
        if self._search is not None:
            self._search.close()
        if self._noting is not None:
            self._noting.join(NOTE_JOIN_S)
        if self._lender is not None:
            self._lender.close()
        if self._budget is not None:
            self._budget.close()
        if self._stack is not None:
            self._stack.close()
        if self._budget is not None:
            self._budget.leave()
        self._fail_late()

    def change_weights(self, *, tree_is_empty: bool) -> None:
        """Start a namespace of its own for weights that were replaced in this process.

        If the tree still holds KV of the old weights within reach (not ``tree_is_empty``), stores
        are refused until it is reset, since nothing tells those pages from new ones.
        """
        was_searching = self._search is not None
        if self._search is not None:
            self._search.stop()
        with self.gate.lock:
            # What the backup thread decides before this is stored under the old namespace, and what
            # it decides after sees the flag.
            self._stores_suspended = not tree_is_empty
            self._set_claim(changing=True)
            self._namespace = namespace.successor(self._namespace)
            # No process can name the namespace of an update again: its space is reused first.
            self.stack.set_namespace(self._namespace, keep=not self._num_updates)
            self._search = None
            self._num_updates += 1
            self._set_claim()
            self._fail_late()
        if was_searching:
            self._collect()
        waits = "" if tree_is_empty else "; it stores nothing until the old KV in memory is flushed"
        logger.info(
            "NVMe tier: namespace changed to %s (new weights)%s", self._namespace.hex()[:16], waits
        )

    @property
    def stack(self) -> TierStack:
        """The NVMe tier, with other servers and the object tier where they are configured."""
        assert self._stack is not None, "SGLang has not registered its host pools"
        return self._stack

    @property
    def has_object_tier(self) -> bool:
        return self._config.object is not None

    def erase(self, what: Erasure) -> Future[bool]:
        """Erase in every tier, and drop what is on its way. Memory only, any thread. Single pages
        are hidden in memory before (``use_hidden``), or the backup thread would store them. The
        first server means pages of every pool, and with a tenant's those whose tenant is unknown:
        they may be its own; what it tells others is whole."""
        if what.keys is not None and what.spread:
            keys = [key for pool in self._pool_names() for key in engine_keys(pool, what.hashes)]
            what = Erasure(tuple(keys), None, what.id)
        with self.gate.lock:
            if what.tenant is None or not what.spread:
                return self._erase(what)
            unknown = Erasure(tenant=UNKNOWN_TENANT, id=xxhash.xxh3_128_digest(what.id))
            return all_true([self._erase(what), self._erase(unknown)])

    def _erase(self, what: Erasure) -> Future[bool]:
        if what.keys is None:
            self.gate.drop_queued(what.tenant)
        if self._search is None or not self.stack.remote:
            return self.stack.erase(what)
        # In the bucket and the index an erasure is of a namespace.
        self._late.append((what, late := promise()))
        return all_true([self.region_engine.erase(what), late])

    def _erase_late(self) -> None:
        for what, late in self._late:
            self.stack.erase(what).add_done_callback(partial(keep_as, late))
        self._late.clear()

    def _fail_late(self) -> None:
        """Answer that what waited for a namespace is not erased: nobody knows that one any more."""
        for _, late in self._late:
            keep(late, False)
        self._late.clear()

    def use_hidden(self, pages: HiddenPages, *, counts_pages: bool) -> None:
        """Store none of the pages that are hidden in memory. ``counts_pages``: host memory keeps
        pages, so those that leave it are counted."""
        self.counts_pages = counts_pages
        if self._gate is not None:
            self._gate.hidden = pages

    def refuse_queued_stores(self) -> None:
        """Store nothing more of what SGLang has queued up to now: what it holds was hidden.
        Scheduler thread."""
        with self.gate.lock:
            self.gate.drop_queued(None)

    def tree_was_reset(self) -> None:
        """Allow stores again: no page of an earlier state is left in the tree."""
        if self._gate is None:  # and nothing was stored yet
            return
        with self._gate.lock:
            self._stores_suspended = False
        self._gate.tree_was_reset()

    def drop_stores(self, dropping: bool) -> None:
        """Set whether stores that SGLang has queued end at once, as does the rest of those under
        way. Memory only."""
        with self.gate.lock:
            self._dropping_stores = dropping
            for job in self._storing if dropping else ():
                job.cancel()

    @property
    def gate(self) -> StoreGate:
        """The admission gate, where the scheduler thread announces what it queues."""
        assert self._gate is not None, "SGLang registers the host pools before it queues a store"
        return self._gate

    # ---- Queries (any thread, memory only) ----

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
        """Return the longest prefix that KV and every other pool can restore together.

        ALL_PAGES pools must hold every page of the prefix, TRAILING_PAGES pools (SWA windows,
        Mamba states) its last ``len(transfer.keys)`` pages.
        """
        digests = self._keys(PoolName.KV, keys)
        kv_pages = self.stack.lookup(digests).num_hits
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        ends = np.arange(1, kv_pages + 1)
        restorable = np.ones(kv_pages, np.bool_)
        for transfer in pool_transfers or []:
            if not restorable.any():
                break
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                window = kv_pages
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
            else:
                raise ValueError(
                    f"pool {transfer.name} has hit policy {transfer.hit_policy}, which the tiered "
                    "storage does not serve; start with --tier-mode host."
                )
            of_pool = host_pages.derive_keys(transfer.name, digests[:kv_pages])
            held = np.array(self.stack.contains(of_pool))
            last_lacking = np.maximum.accumulate(np.where(held, 0, ends))
            covered = ends - last_lacking >= np.minimum(window, ends)
            if covered.any():
                hits[transfer.name] = int(ends[covered][-1])
            restorable &= covered
        found = ends[restorable].tolist()
        return PoolTransferResult(found[-1] if found else 0, hits, found)

    # ---- Transfers (SGLang's storage threads) ----

    def begin_load(
        self,
        pool: PoolName,
        hashes: Sequence[str],
        host_indices: torch.Tensor,
        *,
        tenant: bytes | None = None,
        meter: Meter | None = None,
    ) -> Job:
        """Begin to read pages into host memory; the planner learns from each tier's reads. What a
        remote tier serves is kept on NVMe for ``tenant``, if that is known. Waits for no I/O."""
        pages = page_segments(self._pool(pool), host_indices, len(hashes))
        run = Run(tuple(self._keys(pool, hashes)), pages, meter=meter)
        submit = partial(self._begin_load, tenant=tenant)
        return submit(run) if self._lender is None else self._lender.load(run, submit)

    def _begin_load(self, run: Run, tenant: bytes | None = None) -> Job:
        deadline_s = None if self._planner is None else self._planner.far_deadline_s
        return self.stack.submit_load(run, deadline_s=deadline_s, tenant=tenant)

    def _begin_for_others(self, run: Run) -> Job:
        """Begin to read pages for a rank that shares those of this one, which loads them itself too
        and knows whose they are. Any thread."""
        stack = self.stack
        return self._begin_load(run) if stack.remote else stack.nvme.submit_load(run)

    def note_loaded(self, job: Job, host_indices: torch.Tensor) -> None:
        """Note where the KV pages of a load lie, once that is done."""
        if self._seen_pages is not None:
            self._seen_pages.note(job.run.keys, host_indices, job.ok)

    def begin_store(
        self,
        pool: PoolName,
        hashes: Sequence[str],
        host_indices: torch.Tensor,
        store: QueuedStore,
    ) -> BegunStore:
        """Hand to the tier what admission lets in of a part of a node's pages. Waits for no I/O."""
        num_pages, admitted, job = len(hashes), 0, None
        with self.gate.lock:
            suspended = self._stores_suspended or self._search is not None
            if suspended or self._dropping_stores:
                self.gate.refuse(store)
            else:
                admitted = self.gate.num_admitted(store, hashes)
            if admitted:
                pages = page_segments(self._pool(pool), host_indices, num_pages)[:admitted]
                run = Run(tuple(engine_keys(pool, hashes[:admitted])), pages, store.tenant)
                job = self.stack.submit_store(run)
                self._storing.add(job)
            # A flush counts them itself.
            is_counted = pool == PoolName.KV and self.counts_pages
            counts = is_counted and not self._dropping_stores
            why = None if suspended else store.dropped_as
        return BegunStore(job, host_indices, num_pages, admitted, why, counts)

    def end_store(self, begun: BegunStore) -> list[bool]:
        """Wait for a store; return which of its pages are held. One that was on its way already may
        have failed there since."""
        stored = []
        if begun.job is not None:
            begun.job.wait()
            stored = [
                reason is Reason.OK
                or (
                    reason is Reason.DUPLICATE
                    and self.stack.nvme.lookup([key]).stop in (Stop.END, Stop.PENDING)
                )
                for key, reason in zip(begun.job.run.keys, begun.job.reasons, strict=True)
            ]
            with self.gate.lock:
                self._storing.discard(begun.job)
        stored += [False] * (begun.num_pages - begun.num_admitted)
        if begun.counts:
            outcomes = store_outcomes(stored, begun.num_admitted, begun.why)
            self.accounting.note_stored(begun.host_indices, outcomes)
            if self._seen_pages is not None and begun.job is not None:
                self._seen_pages.note(begun.job.run.keys, begun.host_indices, stored)
        return stored

    def _pool(self, name: PoolName) -> Any:
        return self.mem_pool_host if name == PoolName.KV else self.registered_pools[name]
