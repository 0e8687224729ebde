"""What running requests generate is neither lost, nor kept or freed twice."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from cache_world import PAGE, CacheWorld
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session

from sglang_tiered.integration.cache.publishing import checkpoint_answers

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
        self.world.admit(req, PROMPT[:-1])
        self.reqs.append(req)
        self.world.take_slots(req, req.kv.kv_allocated_len, len(PROMPT))
        self.cache.checkpoint(req, up_to=len(PROMPT))
        req.output_ids.append(answer[0])
        return req

    def step(self) -> None:
        """One batch: a token of each request, and what is done once its result was processed."""
        running = [req for req in self.reqs if not req.finished() and req.kv.holds_kv]
        for req in running:
            end = req.kv.kv_committed_len
            self.world.take_slots(req, end, end + 1)
            req.output_ids.append(req.answer[len(req.output_ids)])
        batch = SimpleNamespace(reqs=running)
        checkpoint_answers(self.cache, batch, self.every, may_free=self.may_free)

    def num_known(self) -> int:
        return int(self.world.match(PROMPT + ANSWER).device_prefix_len)


@pytest.fixture
def running(world: CacheWorld) -> Iterator[Running]:
    made = Running(world)
    yield made
    for req in made.reqs:
        if req.kv.holds_kv:
            world.end(req)
    world.check_owners()


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


@pytest.mark.parametrize("seed", range(6))
def test_no_page_is_owned_twice_or_by_nobody(running: Running, seed: int) -> None:
    """Equal answers, some of which end, abort or are retracted, on a device that must evict."""
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
                    running.world.end(req)
                case 1:
                    running.world.end(req, FINISH_ABORT())
                case 2:  # as a retraction has it
                    release_kv_cache(req, running.cache, checkpoint=source.random() < 0.5)
                    req.is_retracted = True
