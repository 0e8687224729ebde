"""A recorded workload on a small store: what its log costs in hits and in written bytes."""

from __future__ import annotations

import collections
import hashlib
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.errors import TraceError
from sglang_tiered.storage.base import Reason, Run
from sglang_tiered_lab.trace.inputs import Input
from storage_bench.figures import DifferentBytesError
from storage_bench.host_memory import HostPages
from storage_bench.own_engine import open_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.region.engine import RegionEngine
    from storage_bench.setting import Setting


PAGE_BYTES = 32 << 10
_CAPACITY_SHARE = 0.3  # of the bytes of all different pages
_MIN_REGIONS = 24
_MAX_REGION_BYTES = 64 << 20
_MIN_REGION_BYTES = 1 << 20
_QUICK_REQUESTS = 2000


@dataclass
class _Replay:
    num_pages: int = 0
    num_hits: int = 0
    num_hits_lru: int = 0
    num_hits_infinite: int = 0
    stored_bytes: int = 0
    # Counters of the engine and our own when the capacity had been stored once.
    at_first_fill: tuple[int, int] | None = None
    write_amplification: float = 0.0
    seconds: float = 0.0
    bytes_loaded: int = 0
    num_rejected: int = 0


class PageLru:
    """The textbook cache of the same capacity: whole pages, least recently used first to go."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def access(self, keys: Sequence[bytes]) -> int:
        """Leading hits of a chain; afterwards its pages are the most recent ones."""
        num_hits = 0
        while num_hits < len(keys) and keys[num_hits] in self._pages:
            num_hits += 1
        for key in keys:
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self._num_pages:
            self._pages.popitem(last=False)
        return num_hits


def chain_keys(hash_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Each key names its page and all before it."""
    return tuple(
        itertools.accumulate(
            hash_ids,
            lambda key, page: hashlib.sha256(key + page.to_bytes(8, "little")).digest(),
            initial=b"",
        )
    )[1:]


def needed_bytes(quick: bool) -> int:
    return 4 << 30


def num_files(quick: bool) -> int:
    return 1000


def run(setting: Setting) -> None:
    if setting.trace is None:
        setting.report.note("No trace was replayed: pass --trace.")
        return
    limit = _QUICK_REQUESTS if setting.quick else None
    requests = Input(setting.trace, limit=limit, allow_dropped=setting.allow_dropped).load_timed()
    if not requests:
        raise TraceError(f"{setting.trace} holds no request; there is nothing to replay.")
    chains = [chain_keys(request.block_ids) for request in requests]
    unique = len({key for keys in chains for key in keys})
    capacity_bytes = int(unique * PAGE_BYTES * _CAPACITY_SHARE)
    region_bytes = _MAX_REGION_BYTES
    while region_bytes > _MIN_REGION_BYTES and capacity_bytes // region_bytes < _MIN_REGIONS:
        region_bytes //= 2
    setting.workspace.check_space(capacity_bytes + (1 << 30), 1000)
    with (
        setting.workspace.folder("trace") as folder,
        setting.steps("trace", len(chains)) as step,
    ):
        engine = open_engine(folder, capacity_bytes, region_bytes)
        try:
            replay = _replay(engine, chains, capacity_bytes, step)
        finally:
            engine.close()
    _report(setting, replay)
    setting.report.settings["trace"] = {
        "file": setting.trace.name,
        "num_requests": len(chains),
        "unique_pages": unique,
        "page_bytes": PAGE_BYTES,
        "capacity_bytes": capacity_bytes,
        "capacity_over_unique": _CAPACITY_SHARE,
        "region_bytes": region_bytes,
    }


def _replay(
    engine: RegionEngine,
    chains: Sequence[tuple[bytes, ...]],
    capacity_bytes: int,
    step: Callable[[], None],
) -> _Replay:
    """One request at a time, each stored before the next: the same hits in every run."""
    replay = _Replay()
    memory = HostPages(max(map(len, chains)), PAGE_BYTES, seed=4)
    lru = PageLru(capacity_bytes // PAGE_BYTES)
    seen: set[bytes] = set()
    start = time.perf_counter()
    for keys in chains:
        num_hits = engine.lookup(keys).num_hits
        if num_hits:
            num_hits = _load(engine, keys[:num_hits], memory)
        if num_hits < len(keys):
            replay.stored_bytes += _store(engine, keys[num_hits:], memory, replay)
        replay.num_pages += len(keys)
        replay.num_hits += num_hits
        replay.num_hits_lru += lru.access(keys)
        replay.num_hits_infinite += next(
            (number for number, key in enumerate(keys) if key not in seen), len(keys)
        )
        seen.update(keys)
        if replay.at_first_fill is None and replay.stored_bytes >= capacity_bytes:
            replay.at_first_fill = (engine.stats().bytes_written, replay.stored_bytes)
        step()
    replay.seconds = time.perf_counter() - start
    stats = engine.stats()
    replay.bytes_loaded = stats.bytes_loaded
    written, stored = replay.at_first_fill or (0, 0)
    if replay.stored_bytes > stored:
        replay.write_amplification = (stats.bytes_written - written) / (
            replay.stored_bytes - stored
        )
    return replay


def _load(engine: RegionEngine, keys: tuple[bytes, ...], memory: HostPages) -> int:
    """Leading pages loaded; each must begin with its own key."""
    job = engine.submit_load(Run(keys, memory.pages[: len(keys)]))
    if not job.wait(120.0):
        raise RuntimeError("a load took more than 120 s")
    for key, (page,) in zip(keys[: job.num_leading_ok], memory.pages, strict=False):
        if page[: len(key)] != key:
            raise DifferentBytesError("a page of the trace begins with another key than its own")
    return job.num_leading_ok


def _store(
    engine: RegionEngine, keys: tuple[bytes, ...], memory: HostPages, replay: _Replay
) -> int:
    """Bytes stored anew. Pages that are held behind a miss are duplicates and cost nothing."""
    pages = memory.pages[: len(keys)]
    for key, (page,) in zip(keys, pages, strict=True):
        page[: len(key)] = key
    job = engine.submit_store(Run(keys, pages))
    if not job.wait(120.0):
        raise RuntimeError("a store took more than 120 s")
    replay.num_rejected += job.reasons.count(Reason.REJECTED)
    return job.reasons.count(Reason.OK) * PAGE_BYTES


def _report(setting: Setting, replay: _Replay) -> None:
    report = setting.report
    rate = replay.num_hits / replay.num_pages
    lru, infinite = (
        hits / replay.num_pages for hits in (replay.num_hits_lru, replay.num_hits_infinite)
    )
    report.add("trace_hit_rate", [rate], beside=f"page LRU {lru:.3f}, infinite {infinite:.3f}")
    if lru:
        report.add("trace_hit_rate_over_page_lru", [rate / lru], beside="same capacity, simulated")
    if infinite:
        report.add("trace_hit_rate_over_infinite", [rate / infinite], beside="without bound")
    if replay.write_amplification:
        report.add(
            "write_amplification",
            [replay.write_amplification],
            wanted="<= 1.15",
            beside="after the capacity was stored once",
        )
    else:
        report.note("The trace does not fill the store once: no write amplification.")
    report.raw["trace"] = vars(replay)
