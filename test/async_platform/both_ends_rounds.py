"""Conversations that return from a disk of changing speed, with SGLang's real scheduler in this
process: some are computed from both ends, while requests are aborted and retracted, memory is
evicted and the disk stalls and fails.

Arguments: the model's folder, how many returns, a seed. The last line is JSON.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import scheduler_rounds
from scheduler_rounds import SMALL_REGIONS, Answer, Client, make_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_FAMILIES, NUM_CONVERSATIONS = 3, 12
LENGTHS = 1200, 2400
SPEEDS = (0.05, 0.25, 0.57, 1.0, 2.0, 6.0)
"""What loading takes, over computing."""
STALL_S = 1.5
DEADLINE_S = 120.0

scheduler_rounds.FLAGS = (
    *("--dtype", "float32", "--host", "127.0.0.1", "--port", "29918", "--log-level", "warning"),
    *("--max-total-tokens", "8192", "--tier-host-bytes", "96MiB", "--chunked-prefill-size", "512"),
    *("--config", SMALL_REGIONS),
)


class ChangingDisk:
    """Paces what the NVMe tier reads; any read may hang or bring damaged bytes, and for a while
    all fail."""

    def __init__(self, scheduler: Any, source: random.Random) -> None:
        from sglang_tiered.storage.region.device import FileDevice

        cache = scheduler.tree_cache
        self.load_over_prefill = 0.0
        self.is_broken = False
        self.counts: Counter[str] = Counter()
        self._source = source
        self._costs = cache.tiering.planner.costs
        self._lock, self._never = threading.Lock(), threading.Event()
        self._free_at = 0.0
        read = FileDevice.readv

        def slow_read(device: Any, fd: int, segments: Any, offset: int) -> int:
            self._wait(sum(segment.nbytes for segment in segments))
            if self.is_broken:
                self.counts["failed reads"] += 1
                raise OSError(errno.EIO, "the disk is broken on purpose")
            num_read = read(device, fd, segments, offset)
            if self.load_over_prefill and self._source.random() < 0.003:
                self.counts["damaged reads"] += 1
                segments[0][0] ^= 1
            return num_read

        FileDevice.readv = slow_read  # type: ignore[method-assign]

    def _wait(self, num_bytes: int) -> None:
        num_tokens = num_bytes / self._costs.bytes_per_token
        read_s = num_tokens * self._costs.prefill.seconds(2048, 0) / 2048 * self.load_over_prefill
        with self._lock:
            if self.load_over_prefill and self._source.random() < 0.003:
                self.counts["stalls"] += 1
                read_s += STALL_S
            self._free_at = max(self._free_at, time.monotonic()) + read_s
            wait_s = self._free_at - time.monotonic()
        self._never.wait(max(0.0, wait_s))


class ReturningClient(Client):
    """A ``Client`` that can abort, and do things between two steps of the scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._deeds: list[tuple[Callable[[], Any], list[Any], threading.Event]] = []
        super().__init__(scheduler)
        self.aborted: set[str] = set()

    def _received(self) -> list[Any]:
        while self._deeds:
            deed, result, is_done = self._deeds.pop(0)
            result.append(deed())
            is_done.set()
        return super()._received()

    def on_scheduler(self, deed: Callable[[], Any]) -> Any:
        """Have the scheduler's thread do something between two steps; what it returned."""
        result: list[Any] = []
        is_done = threading.Event()
        self._deeds.append((deed, result, is_done))
        assert is_done.wait(DEADLINE_S), "the scheduler stands still"
        return result[0]

    def _take(self, output: Any) -> None:
        rid = getattr(output, "rid", None)
        with self._changed:
            if rid in self._answers:  # the word that it was aborted while it waited
                self._answers[rid].is_done = True
                self._changed.notify_all()
        super()._take(output)

    def abort(self, answer: Answer) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        (rid,) = (rid for rid, each in self._answers.items() if each is answer)
        self.aborted.add(rid)
        self._inbox.put(AbortReq(rid=rid))

    def await_all(self, answers: list[Answer]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        with self._changed:
            while not all(answer.is_done for answer in answers):
                assert time.monotonic() < deadline, "no answer"
                self._changed.wait(0.1)

    def is_aborted(self, answer: Answer) -> bool:
        return any(self._answers[rid] is answer for rid in self.aborted)


class Returns:
    """The conversations, and what happens to them."""

    def __init__(self, scheduler: Any, client: ReturningClient, num_returns: int, seed: int):
        source = self._source = random.Random(seed)
        self._scheduler, self._client, self._num_left = scheduler, client, num_returns
        self.disk = ChangingDisk(scheduler, random.Random(seed + 1))
        families = [self._tokens(LENGTHS[0]) for _ in range(NUM_FAMILIES)]
        families[0] = self._tokens(64) * (LENGTHS[0] // 64)  # pages that repeat
        self._prompts = [
            families[number % NUM_FAMILIES][: source.randrange(64, LENGTHS[0])]
            + self._tokens(source.randrange(LENGTHS[0], LENGTHS[1]))
            for number in range(NUM_CONVERSATIONS)
        ]
        self._expected: list[list[int]] = []
        self.num_wrong = self.num_aborted = self.num_returned = 0
        self.hits: Counter[str] = Counter()

    def _tokens(self, number: int) -> list[int]:
        return [self._source.randrange(32, 127) for _ in range(number)]

    def run(self) -> None:
        for prompt in self._prompts:
            (answer,) = self._client.ask([prompt], 1)
            self._expected.append(answer.tokens)
        self._settle()
        while self._num_left > 0:
            self._one_round()
        self.disk.load_over_prefill, self.disk.is_broken = 0.0, False

    def _one_round(self) -> None:
        source, client = self._source, self._client
        client.on_scheduler(self._evict)
        self.disk.load_over_prefill = source.choice(SPEEDS)
        self.disk.is_broken = source.random() < 0.05
        chosen = source.sample(range(NUM_CONVERSATIONS), source.choice((1, 1, 2, 3)))
        answers = [client._submit(self._prompts[number]) for number in chosen]
        self._num_left -= len(chosen)
        if source.random() < 0.15:
            threading.Event().wait(source.random() * 0.5)  # in the middle of something
            client.abort(source.choice(answers))
        if source.random() < 0.15:
            threading.Event().wait(source.random() * 0.5)
            client.on_scheduler(self._evict)
        client.await_all(answers)
        for number, answer in zip(chosen, answers, strict=True):
            if client.is_aborted(answer):
                self.num_aborted += 1
                continue
            self.num_returned += 1
            self.num_wrong += answer.tokens != self._expected[number]
            for tier in ("device", "host", "storage"):
                self.hits[tier] += answer.cached.get(tier) or 0
        if source.random() < 0.5:
            self._settle()

    def _evict(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        cache = self._scheduler.tree_cache
        cache.evict(EvictParams(num_tokens=10**9))
        cache.evict_host(10**9)

    def _settle(self) -> None:
        """Wait until everything is stored."""
        cache = self._scheduler.tree_cache
        deadline = time.monotonic() + DEADLINE_S
        while self._client.on_scheduler(
            lambda: cache.is_under_way() or bool(cache.tiering.stores.queue.waiting())
        ):
            assert time.monotonic() < deadline, "stores do not end"

    def left_over(self) -> dict[str, Any]:
        """What is still held once nothing runs. Empty, or somebody forgot something."""
        self._settle()
        return dict(self._client.on_scheduler(self._left_over))

    def _left_over(self) -> dict[str, Any]:
        self._evict()
        cache, scheduler = self._scheduler.tree_cache, self._scheduler
        host = cache.cache_controller.mem_pool_host
        allocator, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
        planner = cache.tiering.planner
        held = {
            "locked tokens": cache.protected_size(),
            "device tokens": allocator.size - allocator.available_size(),
            "host tokens": host.logical_size - host.available_size(),
            "rows": rows.size - rows.available_size(),
            "loads": len(cache.ongoing_prefetch),
            "loading tokens": cache.cache_controller.prefetch_tokens_occupied,
            "loaded spans": len(cache.prefetch_loaded_tokens_by_reqid),
            "unsettled hits": len(cache._storage_prefetch_hit_remaining_by_reqid),
            "planned requests": len(planner.loads) + planner.num_waiting,
            "waiting requests": len(scheduler.waiting_queue),
        }
        return {name: number for name, number in held.items() if number}


def main(model: str, num_returns: str, seed: str) -> None:
    result: dict[str, Any] = {}
    with ExitStack() as held, tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(model, folder, held)
        client = ReturningClient(scheduler)
        returns = Returns(scheduler, client, int(num_returns), int(seed))

        def work() -> None:
            try:
                returns.run()
                result["left over"] = returns.left_over()
            except Exception:
                result["error"] = traceback.format_exc()
            scheduler.gracefully_exit = True

        threading.Thread(target=work, daemon=True).start()
        try:
            scheduler.run_event_loop()
        except Exception:
            result["error"] = traceback.format_exc()
        planner = scheduler.tree_cache.tiering.planner
        result |= {
            "returned": returns.num_returned,
            "aborted": returns.num_aborted,
            "wrong": returns.num_wrong,
            "both ends": planner.num_both_ends,
            **returns.disk.counts,
            "hits": dict(returns.hits),
            "decisions": {decision.value: n for decision, n in planner.tokens.items()},
        }
        if "ASYNC_PLATFORM_SEED" in os.environ:
            from seams import BED

            BED.device.synchronize()
            result["violations"] = BED.report.take()
            result["counts"] = BED.device.counts
        print(json.dumps(result), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
