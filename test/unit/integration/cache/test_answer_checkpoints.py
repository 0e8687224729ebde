"""What running requests generate is lost, kept twice or freed twice: over SGLang's own requests,
tree and pools, and a real store."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from cache_world import PAGE, CacheWorld, cache_world
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session

from sglang_tiered.integration.cache.ahead import answer_checkpoints
from sglang_tiered.integration.cache.ahead.answer_checkpoints import checkpoint_answers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = array("q", range(1, 4 * PAGE + 6))
ANSWER = array("q", range(1000, 2000))


class Running:
    """What the scheduler does for requests of one prompt that are generated beside each other."""

    def __init__(self, world: CacheWorld) -> None:
        self.world, self.cache, self.every = world, world.cache, 2 * PAGE
        self.may_free = True
        self.reqs: list[Req] = []

    def begin(self, answer: array[int] = ANSWER) -> Req:
        req = Req(f"r{len(self.reqs)}", "", PROMPT[:], SamplingParams(max_new_tokens=999))
        req.answer = answer
        req.refresh_fill_ids()
        match = self.match(PROMPT[:-1], req)
        req.last_node, req.prefix_len = match.last_device_node, match.device_prefix_len
        req.last_host_node = match.last_host_node
        req.lock = self.cache.lock(req.last_node)
        pool = self.cache.req_to_token_pool
        pool.alloc([req])
        held = self.cache.path_device_indices(req.last_node)
        pool.write((req.kv.req_pool_idx, slice(0, len(held))), held)
        req.kv.cache_protected_len = req.kv.kv_allocated_len = len(held)
        self.reqs.append(req)
        self._take_slots(req, len(PROMPT))
        self.cache.checkpoint(req, up_to=len(PROMPT))
        req.output_ids.append(answer[0])
        return req

    def step(self) -> None:
        """One batch: a token of each request, and what is done once its result was processed."""
        running = [req for req in self.reqs if not req.finished() and req.kv.holds_kv]
        for req in running:
            self._take_slots(req, req.kv.kv_committed_len + 1)
            req.output_ids.append(req.answer[len(req.output_ids)])
        batch = SimpleNamespace(reqs=running)
        checkpoint_answers(self.cache, batch, self.every, may_free=self.may_free)

    def _take_slots(self, req: Req, end: int) -> None:
        row = self.cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        for position in range(req.kv.kv_allocated_len, end):
            if position % PAGE == 0:
                self.evict_for_a_page()
                row[position] = self.world.alloc(PAGE)[0]
            else:
                row[position] = row[position - 1] + 1
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end

    def evict_for_a_page(self) -> None:
        if self.world.allocator.available_size() < PAGE:
            self.world.wait_for_copies()
            self.cache.evict(EvictParams(num_tokens=PAGE))

    def end(self, req: Req, reason: Any = None) -> None:
        req.finished_reason = reason or FINISH_LENGTH(length=len(req.output_ids))
        req.finished_len = len(req.output_ids)
        release_kv_cache(req, self.cache, checkpoint=True)

    def match(self, tokens: array[int], req: Req | None = None) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None), req=req))

    def num_known(self, answer: array[int] = ANSWER) -> int:
        return int(self.match(PROMPT + answer).device_prefix_len)

    def check(self) -> None:
        """Every slot of the device has one owner, once all requests are over."""
        for req in self.reqs:
            if req.kv.holds_kv:
                self.end(req)
        self.world.wait_for_copies()
        self.world.until(lambda: not self.cache.ongoing_backup)
        assert self.cache.protected_size() == 0
        owned = self.cache.all_values_flatten()
        assert len(set(owned.tolist())) == len(owned)
        assert self.world.allocator.available_size() + len(owned) == self.world.allocator.size_full
        self.cache.sanity_check()


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        made = Running(world)
        yield made
        made.check()


def test_a_running_answer_is_on_nvme(running: Running) -> None:
    running.begin()
    for _ in range(5 * PAGE):
        running.step()
    running.world.until(lambda: running.world.num_stored() >= 8)
    num_computed = len(PROMPT) + 5 * PAGE
    assert num_computed - running.num_known() <= running.every + PAGE
    assert running.num_known() % PAGE == 0


def test_what_is_not_yet_computed_is_not_kept(running: Running) -> None:
    """The KV of the last token is of the next batch."""
    running.every = 1
    req = running.begin()
    while len(PROMPT) + len(req.output_ids) < 6 * PAGE:
        running.step()
    assert running.num_known() == 5 * PAGE
    running.step()
    assert running.num_known() == 6 * PAGE


@pytest.mark.parametrize("why", ["session", "uncacheable"])
def test_others_rows_are_left_alone(running: Running, why: str) -> None:
    req = running.begin()
    if why == "session":
        req.session = Session(1 << 20, "s")
    else:
        req.skip_radix_cache_insert = True
    for _ in range(4 * PAGE):
        running.step()
    assert running.num_known() == len(PROMPT) // PAGE * PAGE
    req.session = None
    req.skip_radix_cache_insert = False


def test_slots_that_batches_read_are_not_freed(running: Running) -> None:
    """On a decode instance a handoff may write into it at once."""
    running.may_free = False
    first, second = running.begin(), running.begin()
    for _ in range(3 * PAGE):
        before = running.world.allocator.available_size()
        running.step()
        assert running.world.allocator.available_size() <= before
    assert first.kv.cache_inserted_len > second.kv.cache_inserted_len
    assert running.num_known() == first.kv.cache_inserted_len


def test_requests_due_together_take_turns(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_checkpoints, "MAX_IN_A_STEP", 1)
    reqs = [running.begin(array("q", range(n, n + 999))) for n in (2000, 5000, 8000)]
    before, found = [req.kv.cache_inserted_len for req in reqs], list[int]()
    while len(found) < 3:
        running.step()
        num_kept = sum(r.kv.cache_inserted_len > old for r, old in zip(reqs, before, strict=True))
        found += [num_kept] if num_kept else []
    assert found == [1, 2, 3]


@pytest.mark.parametrize("seed", range(6))
def test_no_page_is_owned_twice_or_by_nobody(running: Running, seed: int) -> None:
    """Equal answers beside each other, as of ``n``, some that end, abort or are retracted, on a
    device that must evict."""
    source = random.Random(seed)
    other = ANSWER[: 3 * PAGE] + array("q", range(3000, 4000))
    live: list[Req] = []
    for _ in range(40):
        if len(live) < 3 and source.random() < 0.6:
            live.append(running.begin(source.choice([ANSWER, other])))
        running.every = source.choice([1, PAGE, 3 * PAGE])
        running.may_free = source.random() < 0.7
        for _ in range(source.randrange(PAGE)):
            running.step()
        if live and source.random() < 0.5:
            req = live.pop(source.randrange(len(live)))
            match source.randrange(3):
                case 0:
                    running.end(req)
                case 1:
                    running.end(req, FINISH_ABORT())
                case 2:  # as a retraction has it
                    release_kv_cache(req, running.cache, checkpoint=source.random() < 0.5)
                    req.is_retracted = True
