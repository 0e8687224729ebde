"""SGLang's own scheduling pass over a real ``TieredRadixCache`` and a real store, without a model.

Each KV slot holds a number that depends on every token before it, and every prefix is compared
before each batch. Arguments: a folder, a seed (or ``FIRST-LAST``), ``overlap`` or ``normal``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
from array import array
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.append(str(Path(__file__).resolve().parents[1] / "async_platform"))
torch.set_num_threads(1)
for name in [name for name in os.environ if name.startswith("SGLANG_")]:
    del os.environ[name]

from erasing_traffic import TENANTS, ErasingTraffic  # noqa: E402
from load_states import LoadWatch  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch  # noqa: E402
from sglang.srt.managers.schedule_policy import SchedulePolicy  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import (  # noqa: E402
    ServerArgs,
    set_global_server_args_for_scheduler,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from slow_reads import SlowReads  # noqa: E402
from small_cache import make_pool, storage_flags  # noqa: E402
from world_waits import BoundedWaits  # noqa: E402

from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode  # noqa: E402
from sglang_tiered.flags import MiB  # noqa: E402
from sglang_tiered.integration.cache.loads import PricedLoad  # noqa: E402
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache  # noqa: E402
from sglang_tiered.integration.identity import namespace  # noqa: E402
from sglang_tiered.integration.plugin import register  # noqa: E402
from sglang_tiered.policy import both_ends  # noqa: E402
from sglang_tiered.policy.cost_model import LoadPlan  # noqa: E402

PAGE, LAYERS, HEADS, DIM = 16, 2, 2, 64
MAX_RUNNING = 16
NUM_STEPS, NUM_FAMILIES = 700, 4
DEADLINE_S = 20.0
DEADLINE_OF_RUN_S = 150.0
ADAPTERS = (None, None, "one", "two")
"""Of each family of prompts."""
ONGOING = ("write_through", "load_back", "prefetch", "backup")
# What SGLang's scheduler has of features that are off here.
NONE = """
chunked_req min_free_slots_delayer dynamic_chunk_sizer dllm_config truncation_align_size
hisparse_coordinator prefill_delayer _pending_chunked_abort_req scheduler_stage_metrics
lora_drainer last_batch mm_receiver max_queued_requests draft_worker
"""
FALSE = """
enable_priority_preemption is_hybrid_swa is_mixed_chunk enable_lora_overlap_loading
enable_lmcache enable_unified_cache_external_linker enable_priority_scheduling enable_hisparse
require_mlp_sync schedule_low_priority_values_first abort_on_priority_when_disabled
_engine_paused
"""
ZERO = """
processed_tokens_counter max_prefill_bs _prefill_decode_interval_remaining
prefill_decode_interval
"""
STAMP = 1024.0
"""What a key slot has beyond its value for each erasure that its request had seen."""


def value_at(tokens: Any) -> torch.Tensor:
    """What each position's slot must hold: below ``STAMP``, and exact in float32 with stamps."""
    numbers = torch.tensor(list(tokens), dtype=torch.float64)
    weights = torch.sqrt(torch.arange(1, len(numbers) + 1, dtype=torch.float64))
    return ((torch.cumsum(numbers * weights, 0) % 1000.0) * 8).round().float() / 8


class SchedulingWorld:
    """A scheduler without a model, over the real cache."""

    def __init__(
        self, folder: str, held: ExitStack, rnd: random.Random, *, has_overlap: bool, seed: int
    ) -> None:
        device_tokens = self.device_tokens = rnd.choice([1024, 2048, 4096])
        host_tokens = int(rnd.choice([0.75, 1.5, 3.0]) * device_tokens)
        chunk_tokens = rnd.choice([64, 128, 256])
        nvme = NvmeConfig(
            directory=folder, capacity_bytes=256 * MiB, region_bytes=4 * MiB, both_ends=True
        )
        host_bytes = host_tokens * 2 * LAYERS * HEADS * DIM * 4
        config = TieredConfig(mode=TierMode.NVME, host_bytes=host_bytes, nvme=nvme, num_ranks=1)
        config.to_environment(os.environ)
        namespace.server_identity = lambda _: {"model": "m"}
        arguments = ServerArgs(
            model_path="dummy",
            page_size=PAGE,
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_write_policy="write_through",
            hicache_storage_prefetch_policy="timeout",
            enable_hierarchical_cache=True,
            attention_backend="torch_native",
            chunked_prefill_size=chunk_tokens,
            **storage_flags(),
        )
        arguments._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(arguments)
        held.enter_context(
            get_parallel().override(
                **dict.fromkeys(("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank"), 0),
                **dict.fromkeys(("tp_size", "pp_size", "dp_size"), 1),
                pp_max_micro_batch_size=64,
            )
        )
        self.rows = ReqToTokenPool(MAX_RUNNING, 2048, "cpu", enable_memory_saver=False)
        shape = {"layers": LAYERS, "heads": HEADS, "dim": DIM}
        self.allocator = make_pool(device_tokens // PAGE, PAGE, **shape)
        self.pool = self.allocator.get_kvcache()
        params = CacheInitParams(
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            disable=False,
            tree_components=(ComponentType.FULL,),
        )
        self.cache: Any = TieredRadixCache(params, config)
        self.cache.init_hicache(arguments, params)
        self.has_overlap = has_overlap
        self.log: list[Any] = []
        self.at_door: list[tuple[int, Any]] = []  # until when decode is late, and for whom
        self.busy_adapters: set[str | None] = set()  # for which there is no slot now
        self.scheduler = self._make_scheduler(chunk_tokens)
        self.erasing = ErasingTraffic(self, random.Random(seed))
        self.scheduler.flush_cache = self.erasing.flush
        self.watch = LoadWatch(self.cache)

    def _make_scheduler(self, chunk_tokens: int) -> Any:
        scheduler = Scheduler.__new__(Scheduler)
        scheduler.__dict__.update(
            **dict.fromkeys(NONE.split()),
            **dict.fromkeys(FALSE.split(), False),
            **dict.fromkeys(ZERO.split(), 0),
            grammar_manager=SimpleNamespace(
                clear=lambda: None,
                has_waiting_grammars=lambda: False,
                grammar_queue=[],
                abort_requests=lambda _: None,
            ),
            waiting_queue=[],
            chunked_prefill_size=chunk_tokens,
            tp_worker=SimpleNamespace(
                model_runner=SimpleNamespace(
                    attn_backend=object(),
                    prefill_aware_swa=False,
                    lora_manager=SimpleNamespace(validate_lora_batch=self.busy_adapters.isdisjoint),
                )
            ),
            new_token_ratio_tracker=SimpleNamespace(current=0.5),
            max_prefill_tokens=16384,
            priority_scheduling_preemption_threshold=10,
            max_running_requests=MAX_RUNNING,
            page_size=PAGE,
            tree_cache=self.cache,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rows,
            enable_lora=True,
            enable_hicache_storage=True,
            enable_hierarchical_cache=True,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            is_generation=True,
            model_config=SimpleNamespace(vocab_size=1 << 20, is_encoder_decoder=False),
            enable_overlap=self.has_overlap,
            beam_coordinator=SimpleNamespace(
                pending_member_rows=lambda _: 0, retire_group=lambda _: None
            ),
            load_inquirer=SimpleNamespace(_get_num_pending_tokens=lambda chunk_deduct=0: 0),
            disaggregation_mode=DisaggregationMode.NULL,
            dp_attn_adapter=SimpleNamespace(
                maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
                maybe_convert_decode_to_extend=lambda batch: batch,
            ),
            ngram_embedding_manager=SimpleNamespace(
                prepare_for_forward=lambda batch, chunked_req=None: batch
            ),
            running_batch=ScheduleBatch(reqs=[], batch_is_full=False),
            send_abort_output=lambda *_: None,
            result_queue=[],
            dllm_manager=SimpleNamespace(any_staging_reqs=lambda: False),
            metrics_reporter=SimpleNamespace(
                reset_metrics=lambda: None, is_stats_logging_rank=False
            ),
            device="cpu",
            collect_inflight_reqs=set,
        )
        scheduler.policy = SchedulePolicy("fcfs", self.cache, True, False, False)
        scheduler.update_running_batch = lambda _: None
        return scheduler

    # ---- A pass ----

    def _run(self, batch: Any) -> Any:
        """Compare every prefix with what it must be, and write what is new."""
        for req in batch.reqs:
            wanted = value_at(req.full_untruncated_fill_ids)
            row = self.rows.req_to_token[req.kv.req_pool_idx].long()
            begin, end = req.prefix_len, req.extend_end
            slots = row[:begin]
            stamps = (self.pool.k_buffer[0][slots, 0, 0] / STAMP).floor()
            number = self.erasing.runs(req, begin, end, stamps.int().tolist())
            for buffers, sign, held_stamps, stamp in (
                (self.pool.k_buffer, 1, stamps, number),
                (self.pool.v_buffer, -1, torch.zeros_like(stamps), 0),
            ):
                for buffer in buffers:
                    held = sign * buffer[slots].flatten(1) - (STAMP * held_stamps)[:, None]
                    wrong = ((held - wanted[:begin, None]).abs() > 1e-3).any(1).nonzero()
                    assert not len(wrong), f"{req.rid}: wrong KV at {wrong[:4]} of {begin}"
                    new = sign * (wanted[begin:end] + STAMP * stamp)
                    buffer[row[begin:end]] = new[:, None, None].expand(-1, HEADS, DIM)
        self.cache.tiering.planner.note_run(len(batch.reqs))
        return SimpleNamespace(batch=batch.copy(), ends=[req.extend_end for req in batch.reqs])

    def _process(self, result: Any) -> None:
        """The part of SGLang's ``process_batch_result_prefill`` that concerns the cache."""
        for req, end in zip(result.batch.reqs, result.ends, strict=True):
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
                continue
            assert end == len(req.origin_input_ids), (req.rid, end)
            assert 0 <= req.cached_tokens <= end, (req.rid, req.cached_tokens, end)
            req.output_ids.append(7)
            req.finished_reason = SimpleNamespace()
            req.finished_len = req.to_finish = None
            release_kv_cache(req, self.cache, checkpoint=True)
            self.log.append(("finished", req.rid, req.cached_tokens))
        self.cache.flush_pending_backups()

    def step(self) -> None:
        """One pass of ``event_loop_overlap``, or of ``event_loop_normal``."""
        scheduler = self.scheduler
        plan = Scheduler.get_next_batch_to_run(
            scheduler, running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            self.log.append([(req.rid, req.prefix_len, req.extend_end) for req in batch.reqs])
            scheduler.result_queue.append(self._run(batch))
        if scheduler.last_batch if self.has_overlap else batch:
            self._process(scheduler.result_queue.pop(0))
        scheduler.last_batch = batch
        if not batch and not self.at_door:
            self.erasing.control.after_idle()

    # ---- Requests ----

    def finished(self, first: int) -> set[str]:
        """Requests that have ended since that entry of the log."""
        return {entry[1] for entry in self.log[first:] if isinstance(entry, tuple)}

    def moves(self) -> Iterator[str]:
        """How each part of a request goes on from the one before it."""
        ends: dict[str, int] = {}
        for batch in (entry for entry in self.log if isinstance(entry, list)):
            for rid, begin, end in batch:
                if rid in ends:
                    last = ends[rid]
                    yield "jump" if begin > last else "go on" if begin == last else "lost"
                ends[rid] = end

    def request(self, rid: str, tokens: list[int], family: int) -> Any:
        sampling = SamplingParams(max_new_tokens=1)
        sampling.normalize(None)
        names = {"extra_key": TENANTS[family], "lora_id": ADAPTERS[family]}
        req = Req(rid, "", array("q", tokens), sampling, vocab_size=1 << 20, **names)
        self.erasing.control.after_request(None, req)
        return req

    def add(self, rid: str, tokens: list[int], family: int) -> None:
        Scheduler._add_request_to_queue(self.scheduler, self.request(rid, tokens, family))

    def runs_alone(self, rid: str, tokens: list[int], family: int) -> None:
        """A request comes, and is waited for."""
        self.add(rid, tokens, family)
        self.until(lambda: rid in self.finished(0), self.step)
        self.step()
        self.settle()

    def abort(self, rid: str) -> bool:
        scheduler = self.scheduler
        chunked = scheduler.chunked_req
        if chunked is not None and chunked.rid == rid:
            scheduler._pending_chunked_abort_req = chunked
            return True
        for req in scheduler.waiting_queue:
            if req.rid == rid:
                scheduler.waiting_queue.remove(req)
                scheduler._release_aborted_request(req)
                return True
        return False

    def until(self, is_so: Callable[[], bool], step: Callable[[], None], more_s: float = 0) -> None:
        deadline = time.monotonic() + DEADLINE_S + more_s
        while not is_so():
            assert time.monotonic() < deadline, (
                self.log[-5:],
                [(req.rid, len(req.origin_input_ids)) for req in self.scheduler.waiting_queue],
                [getattr(self.cache, f"ongoing_{what}") for what in ONGOING],
                self.erasing.open_calls,
                self.cache.tiering.stores.queue.waiting(),
            )
            step()
            time.sleep(0.0005)

    def settle(self) -> None:
        """Every copy, load and store is done."""
        waiting = self.cache.tiering.stores.queue.waiting
        self.until(lambda: not self.cache.is_under_way() and not waiting(), self.rest)

    def rest(self) -> None:
        """A step without requests."""
        self.cache.flush_pending_backups()
        self.cache.check_hicache_events()

    def forget(self) -> None:
        """Empty device and host memory; the store keeps what it has."""
        self.settle()
        self.cache.reset()
        self.allocator.clear()
        self.rows.clear()
        self.scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.scheduler.last_batch = None
        self.scheduler.result_queue.clear()

    def empty_memory(self) -> None:
        """Evict all that nothing locks."""
        self.cache.evict_host(10**9)
        self.cache.evict(EvictParams(num_tokens=10**9))
        self.cache.evict_host(10**9)

    def check_clean(self) -> None:
        """Nothing is left over: no lock, row, page, load or record."""
        cache = self.cache
        self.settle()
        controller = cache.cache_controller
        host = controller.mem_pool_host
        assert cache.protected_size() == 0
        assert cache.evictable_size() + self.allocator.available_size() == self.device_tokens
        assert self.rows.available_size() == MAX_RUNNING
        assert not cache.ongoing_prefetch and not controller.prefetch_tokens_occupied
        assert not cache.tiering.planner.loads
        assert not cache.prefetch_loaded_tokens_by_reqid
        assert not cache._storage_prefetch_hit_remaining_by_reqid
        self.empty_memory()
        assert host.available_size() == host.logical_size
        assert self.allocator.available_size() == self.device_tokens


class RandomPrices:
    """In place of what is learnt: each time something is asked for, another answer. Everything that
    may be decided is, some time."""

    def __init__(self, planner: Any, rnd: random.Random) -> None:
        self.num_planned, self.is_on = 0, False
        self._share = rnd.choice([0.9, 0.5, 0.1])  # of the loads that come from their back
        self._planner, self._rnd = planner, rnd
        both_ends.MIN_SEGMENT_TOKENS = rnd.choice([2, 4, 8]) * PAGE
        both_ends._front_s = lambda *_: rnd.random()
        both_ends.BackLeft.seconds = lambda *_, **__: rnd.random()  # type: ignore[method-assign]
        planner.plan_segments = self.plan_segments

    def plan_segments(self, request: Any, *, num_ahead: int) -> list[int] | None:
        record = self._planner.loads.get(request)
        if not self.is_on or record.prefix is None or self._rnd.random() > self._share:
            return None
        bounds = both_ends.segment_bounds(
            record.prefix["num_before"], record.prefix["num_held"], PAGE
        )
        if bounds:
            self.num_planned += 1
            num_back = bounds[-1] - bounds[0]
            saved_s = self._planner.costs.prefill.seconds(num_back, bounds[0])
            plan = LoadPlan((num_back,), saved_s / 2, saved_s)
            record.load = PricedLoad(plan, is_back=True)
        return bounds or None


class RandomRun:
    """Requests with shared prefixes, alone and in bursts, of adapters whose slots may be taken, and
    behind a decode server that is late; short and late reads, evictions, aborts, and all that
    ``ErasingTraffic`` does."""

    def __init__(self, folder: str, seed: int, held: ExitStack, *, has_overlap: bool) -> None:
        rnd = self.rnd = random.Random(seed)
        self.world = SchedulingWorld(folder, held, rnd, has_overlap=has_overlap, seed=seed + 2)
        self.families = self.world.erasing.families
        self.prices = RandomPrices(self.world.cache.tiering.planner, rnd)
        self.reads = SlowReads(self.world.cache.storage, random.Random(seed + 1))
        self.waits = BoundedWaits(self.world)
        self.live: set[str] = set()
        self.num_requests = self.num_aborted = 0

    def fill_store(self) -> None:
        world, rnd = self.world, self.rnd
        for number in range(NUM_FAMILIES):
            if rnd.random() < 0.5:
                tokens = [rnd.randrange(1, 1000) for _ in range(rnd.randrange(300, 900))]
            else:  # pages that repeat
                tokens = [rnd.randrange(1, 1000) for _ in range(PAGE)] * rnd.randrange(20, 50)
            self.families.append(tokens)
            world.runs_alone(f"p{number}", tokens, number)
        world.forget()

    def arrives(self, number: int) -> None:
        """A request comes; to a prefill server it may come before decode is ready for it."""
        world, rnd = self.world, self.rnd
        family = rnd.randrange(NUM_FAMILIES)
        base = self.families[family]
        tokens = base[: rnd.randrange(1, len(base) + 1)]
        tokens = tokens + [rnd.randrange(1, 1000) for _ in range(rnd.randrange(1, 200))]
        # Longer ones SGLang refuses at the door, and one that needs every page never runs.
        tokens = tokens[: world.device_tokens - 2 * PAGE]
        rid = f"r{self.num_requests:04d}"
        self.num_requests += 1
        self.live.add(rid)
        if rnd.random() < 0.8:
            world.add(rid, tokens, family)
            return
        req = world.request(rid, tokens, family)
        Scheduler._prefetch_kvcache(world.scheduler, req)
        world.at_door.append((number + rnd.randrange(200), req))

    def come_in(self, number: int) -> None:
        """Decode is ready for some requests, and they may be computed."""
        world, purged = self.world, self.world.cache.hidden_tenants
        for _, req in (entry for entry in world.at_door if entry[0] <= number):
            req.extra_key = purged.key_of(req.extra_key, None)
            world.scheduler.waiting_queue.append(req)
        world.at_door = [entry for entry in world.at_door if entry[0] > number]

    def something_happens(self) -> None:
        world, rnd, cache = self.world, self.rnd, self.world.cache
        if rnd.random() < 0.5:
            self.reads.let(rnd.randrange(1, 4))
        if rnd.random() < 0.02 and self.live:
            rid = rnd.choice(sorted(self.live))
            if world.abort(rid):
                self.num_aborted += 1
                self.live.discard(rid)
        if rnd.random() < 0.02:  # decodes take the slots of adapters, or leave them
            world.busy_adapters.clear()
            world.busy_adapters.update(rnd.sample(ADAPTERS[1:], rnd.randrange(len(ADAPTERS))))
        if rnd.random() < 0.03:
            cache.evict(EvictParams(num_tokens=rnd.randrange(16, world.device_tokens)))
        if rnd.random() < 0.03:
            cache.evict_host(rnd.randrange(16, 2 * world.device_tokens))
        world.erasing.something_happens()

    def run(self) -> dict[str, Any]:
        world, rnd = self.world, self.rnd
        self.fill_store()
        self.prices.is_on, self.reads.is_open = True, False
        for number in range(NUM_STEPS):
            few_wait = len(world.scheduler.waiting_queue) < 6
            if number < NUM_STEPS - 200:
                if few_wait and rnd.random() < 0.12:
                    self.arrives(number)
                if rnd.random() < 0.005:
                    for _ in range(rnd.randrange(8, 25)):
                        self.arrives(number)
            self.come_in(number)
            self.something_happens()
            num_logged = len(world.log)
            world.step()
            self.waits.step()
            self.live.difference_update(world.finished(num_logged))
            time.sleep(0.0003)
        self.reads.is_open = True
        world.busy_adapters.clear()
        self.come_in(2 * NUM_STEPS)
        world.until(lambda: self.live.issubset(world.finished(0)), world.step)
        for _ in range(3):
            world.step()
        self.prices.is_on = False
        world.erasing.check_served()
        world.erasing.check_clean()
        world.check_clean()
        world.cache.release_host_resources()
        counts = {"requests": self.num_requests, "aborted": self.num_aborted}
        counts |= {"planned": self.prices.num_planned, "held up": self.waits.num_held_up}
        return {**counts, **Counter(world.moves()), **world.erasing.counts}


def main() -> None:
    folder, seeds, mode = sys.argv[1:4]
    register()
    HookRegistry.apply_hooks()
    first, _, last = seeds.partition("-")
    failed = []
    for seed in range(int(first), int(last or first) + 1):
        child = os.fork()  # of a process that has imported SGLang and has no thread yet
        if child == 0:
            faulthandler.dump_traceback_later(DEADLINE_OF_RUN_S, exit=True)
            with ExitStack() as held:
                run = RandomRun(f"{folder}/{seed}", seed, held, has_overlap=mode == "overlap")
                print(json.dumps({"seed": seed, **run.run()}), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            failed.append(seed)
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
