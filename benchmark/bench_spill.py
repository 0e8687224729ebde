"""What the spiller costs the scheduler thread, per step.

SGLang's own tree, real locks and a real index, 1,000 requests' worth of nodes a round; the storage
thread is left out, so that every microsecond is the scheduler's. Each step offers ``--offers`` new
nodes to a queue that already holds ``--dirty`` (``offer``: SGLang's ``write_backup_storage``), then
runs the spiller once, as ``check_hicache_events`` does, in three states: the disk idle, so that it
hands over the most a step may; stores backed up, so that it only looks; and loads waiting. Times
are processor time of the thread: what other processes take is not the spiller's.

    python benchmark/bench_spill.py [--quick] [--dirty 10000] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_tiered.integration.cache.spiller import Spiller
from sglang_tiered.integration.identity.tenants import tenant_digest
from sglang_tiered.integration.storage.admission_gate import QueuedStore, StoreGate
from sglang_tiered.policy.admission import PageAccounting
from sglang_tiered.policy.shares import HostBudget
from sglang_tiered.storage.base import Health, LookupResult, Stop, TierStats
from sglang_tiered.tools.machine import describe_machine, describe_versions

PAGE = 64
PAGES_PER_NODE = 16
LIMIT_MS = 0.5
STATES = ("disk idle", "stores backed up", "loads waiting")


class Disk:
    """What the gate asks of an NVMe tier, which holds at once what is offered."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def lookup(self, keys: list[bytes]) -> LookupResult:
        num_hits = [*(key in self.keys for key in keys), False].index(False)
        return LookupResult(num_hits, Stop.END if num_hits == len(keys) else Stop.MISS)

    def stats(self) -> TierStats:
        return TierStats(Health.RUNNING, "")


class Tier:
    """The parts of the cache and of the storage class that the spiller asks, over a real tree."""

    decides_alone = True
    has_small_host = False
    takes_stores = True

    def __init__(self, num_nodes: int) -> None:
        params: Any = CacheInitParams(
            disable=False,
            req_to_token_pool=None,  # type: ignore[arg-type]
            token_to_kv_pool_allocator=None,  # type: ignore[arg-type]
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
        self.tree_components = params.tree_components
        self.tree_core = RustUnifiedTreeCore(params)
        self.tree_core.set_hicache_enabled()
        self.tree_core.enable_storage = True
        self.num_tokens = num_nodes * PAGES_PER_NODE * PAGE
        self.accounting = PageAccounting(self.num_tokens, PAGE)
        self.engine: Any = Disk()
        self.gate = StoreGate(self.engine, host_tokens=self.num_tokens, page_bytes=100)
        self.ongoing_backup: dict[int, tuple[int, Any]] = {}
        self.ongoing_prefetch: dict[int, int] = {}
        self.ongoing_write_through: dict[int, Any] = {}
        self.next_page = 0
        self.next_operation = 0
        self.queued: list[tuple[int, QueuedStore]] = []
        self.results: list[SimpleNamespace] = []
        cache: Any = self
        self.spiller = Spiller(
            cache,
            HostBudget(self.num_tokens, 0),
            num_loading=lambda: sum(self.ongoing_prefetch.values()),
        )

    def inc_host_lock_ref(self, node_id: int) -> Any:
        return self.tree_core.inc_host_lock_ref(node_id)

    def dec_host_lock_ref(self, node_id: int, lock: Any) -> None:
        self.tree_core.dec_host_lock_ref(node_id, lock)

    def is_erased(self, node_id: int) -> bool:
        return False

    def begin_store(self, node_id: int, chain_tokens: int) -> int:
        spec = self.tree_core.build_storage_backup_spec(node_id, False)
        self.next_operation += 1
        tenant = tenant_digest(*self.tree_core.prefetch_anchor_info(node_id))
        store = self.gate.queue_store(
            spec.hash_value,
            num_tokens=len(spec.host_value),
            prefix_tokens=chain_tokens,
            tenant=tenant,
        )
        self.queued.append((self.next_operation, store))
        lock = self.inc_host_lock_ref(node_id).to_dec_params()
        self.ongoing_backup[self.next_operation] = (node_id, lock)
        return self.next_operation

    def holds(self, page_hash: str) -> bool:
        return self.engine.lookup([bytes.fromhex(page_hash)]).num_hits == 1

    def num_kept(self, hashes: list[str]) -> int:
        return self.engine.lookup([bytes.fromhex(text) for text in hashes]).num_hits

    def new_node(self) -> int:
        """A chain of its own, as SGLang leaves it in host memory."""
        number = self.next_page
        length = PAGES_PER_NODE * PAGE
        slots = torch.arange(number * PAGE, number * PAGE + length) % self.num_tokens
        self.next_page += PAGES_PER_NODE
        hashes = [
            hashlib.sha256(f"{number}.{i}".encode()).hexdigest() for i in range(PAGES_PER_NODE)
        ]
        key = RadixKey(array("q", range(number * PAGE, number * PAGE + length)), None)
        root = self.tree_core.root_node_handle()
        return int(self.tree_core.insert_host(root, key, slots, hashes).inserted_host_node)

    def work(self) -> None:
        """The storage thread's part, and the release that SGLang's drain does."""
        for operation, store in self.queued:
            self.gate.num_admitted(store, store.hashes)
            self.engine.keys.update(bytes.fromhex(text) for text in store.hashes)
            self.gate.store_ended(store)
            node_id, lock = self.ongoing_backup.pop(operation)
            self.dec_host_lock_ref(node_id, lock)
            tokens = range(store.num_tokens)
            self.results.append(
                SimpleNamespace(id=operation, completed_tokens=len(tokens), host_indices=tokens)
            )
        self.queued.clear()

    def step(self) -> None:
        """What ``check_hicache_events`` does."""
        results, self.results = self.results, []
        if results:
            self.spiller.ended(results, self.gate.waited_s)
        self.spiller.step(self)  # type: ignore[arg-type]


def measure(state: str, num_dirty: int, num_steps: int, num_offers: int) -> dict[str, list[float]]:
    """Milliseconds of each step's offers, and of each step of the spiller."""
    tier = Tier(num_dirty + (num_steps + 1) * num_offers)
    tier.takes_stores = False
    for _ in range(num_dirty):
        tier.spiller.offer_node(tier.new_node())
    tier.takes_stores = True
    if state == "loads waiting":
        tier.ongoing_prefetch = dict.fromkeys(range(1000), 64)
    samples: dict[str, list[float]] = {"offer": [], "step": []}
    gc.collect()
    gc.disable()
    for _ in range(num_steps):
        nodes = [tier.new_node() for _ in range(num_offers)]
        begun = time.thread_time()
        for node in nodes:
            tier.spiller.offer_node(node)
        offered = time.thread_time()
        tier.step()
        ended = time.thread_time()
        samples["offer"].append(1e3 * (offered - begun))
        samples["step"].append(1e3 * (ended - offered))
        if state != "stores backed up":
            tier.work()
    gc.enable()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dirty", type=int, default=10_000, help="nodes that wait")
    parser.add_argument("--offers", type=int, default=2, help="new nodes a step")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    num_steps = 500 if arguments.quick else 2000
    table = Table("state", "offers p50", "p99", "step p50", "p99", "both p99", "wanted")
    raw: dict[str, dict[str, float]] = {}
    for state in STATES:
        samples = measure(state, arguments.dirty, num_steps, arguments.offers)
        both = np.add(samples["offer"], samples["step"])
        figures = {
            "offer_ms_p50": float(np.percentile(samples["offer"], 50)),
            "offer_ms_p99": float(np.percentile(samples["offer"], 99)),
            "step_ms_p50": float(np.percentile(samples["step"], 50)),
            "step_ms_p99": float(np.percentile(samples["step"], 99)),
            "both_ms_p99": float(np.percentile(both, 99)),
        }
        raw[state] = figures
        table.add_row(state, *(f"{figure:.3f} ms" for figure in figures.values()), f"{LIMIT_MS} ms")
    Console().print(table)
    if arguments.json is not None:
        settings = {"dirty": arguments.dirty, "offers": arguments.offers, "steps": num_steps}
        result = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": settings,
            "ratios": {},
            "raw": raw,
        }
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
