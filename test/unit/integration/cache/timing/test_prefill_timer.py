"""A batch's time is its own: not its queue's, not the batch before's, not a copy's. And what is
expected of one before any was timed."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_tiered.integration.cache.prefill_times import PrefillClock, probe_prefill
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.observe.stories import Stories
from sglang_tiered.policy.cost_model import PRIOR_PREFILL
from sglang_tiered.policy.queue_wait import PrefillWork


class Cache(TieredRadixCache):
    """Only what the clock tells."""

    def __init__(self) -> None:
        self.told: list[tuple[list[tuple[int, int]], float]] = []
        self.copied: list[int] = []
        self.num_copied = 0  # for the next batch that waits for copies
        self.work = PrefillWork()
        self.begun: list[list[tuple[int, int]]] = []
        self.tiering: Any = SimpleNamespace(
            planner=self,
            take_copied=self.take_copied,
            prefill_begins=self.prefill_begins,
            work=self.work,
            notes=Stories(self, None, tenant_of=lambda *_: b""),
        )

    def note_run(self, num_running: int) -> None:
        pass

    def prefill_begins(self, spans: list[tuple[int, int]], now: float) -> None:
        self.begun.append(spans)
        self.work.launched(1.0, now)

    def take_copied(self) -> int:
        num_copied, self.num_copied = self.num_copied, 0
        return num_copied

    def note_batch(self, spans: list[tuple[int, int]], seconds: float, num_copied: int) -> None:
        self.told.append((spans, seconds))
        self.copied.append(num_copied)


def make_batch(device: str, *, extends: bool = True, consumer: int = -1) -> ScheduleBatch:
    return ScheduleBatch(
        reqs=[],
        device=device,
        hicache_consumer_index=consumer,
        forward_mode=ForwardMode.EXTEND if extends else ForwardMode.DECODE,
        extend_lens=[100, 1],
        prefix_lens=[0, 900],
    )


class Machine:
    """A scheduler whose batches take the times they are given."""

    def __init__(self) -> None:
        self.now = 10.0
        self.tree_cache = Cache()
        self.running_batch = make_batch("cpu", extends=False)
        self.clock = PrefillClock(lambda: self.now)
        self.numbers = count(1)

    def launch(self, batch: Any, takes_s: float) -> None:
        def run(scheduler: Machine, batch: Any) -> None:
            batch.forward_iter, batch.launch_ts = next(self.numbers), scheduler.now
            scheduler.now += takes_s

        self.clock.around_run(run, self, batch)

    def process(self, batch: Any, ends_at: float, *, overlaps: bool = False) -> None:
        """SGLang takes a result with the batch, or under overlap with what its copy holds."""

        def process(scheduler: Machine, batch: Any, result: Any) -> None:
            scheduler.now = max(scheduler.now, ends_at)

        self.clock.around_result(process, self, batch.copy() if overlaps else batch, None)


SPANS = [(100, 0), (1, 900)]


def test_cpu_batch_takes_what_its_launch_takes() -> None:
    machine = Machine()
    batch = make_batch("cpu")
    machine.launch(batch, 0.5)
    machine.process(batch, ends_at=99.0)
    assert machine.tree_cache.told == [(SPANS, 0.5)]


def test_accelerator_batch_pays_not_for_the_last() -> None:
    machine = Machine()
    first, second = make_batch("cuda"), make_batch("cuda")
    machine.launch(first, 0.0)
    machine.launch(second, 0.0)
    machine.process(first, ends_at=12.0, overlaps=True)
    machine.process(second, ends_at=15.0, overlaps=True)
    assert machine.tree_cache.told == [(SPANS, 2.0), (SPANS, 3.0)]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_that_waits_for_copies_says_how_many(device: str, overlaps: bool) -> None:
    """After a restart every request may return, so each batch has copies to wait for."""
    machine = Machine()
    batches = [make_batch(device), make_batch(device, consumer=2), make_batch(device)]
    for number, batch in enumerate(batches):
        if number:  # by now the copies for the batch after the next are being prepared
            machine.tree_cache.num_copied += 100 * number
        machine.launch(batch, 0.5)
    for batch in batches:
        machine.process(batch, ends_at=machine.now + 1.0, overlaps=overlaps)
    assert machine.tree_cache.copied == [0, 100, 0]
    assert machine.tree_cache.num_copied == 200


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_prefills_count_as_prefill_work(device: str) -> None:
    machine = Machine()
    work = machine.tree_cache.work
    for extends in (True, False, True):
        batch = make_batch(device, extends=extends)
        machine.launch(batch, 0.5)
        assert work.is_running == (extends and device == "cuda")
        machine.process(batch, machine.now + 0.5)
        assert not work.is_running
    assert machine.tree_cache.begun == [SPANS, SPANS]


def test_without_weights_the_built_in_prior_stands(tmp_path: Path) -> None:
    machine: Any = {"dtype": torch.float32, "device": "cpu", "num_ranks": 1, "token_bytes": 1}
    for path in (tmp_path, tmp_path / "no-such-model"):
        cost = probe_prefill(str(path), None, **machine)
        assert cost.num_observed == 0 and cost.prices[:3] == PRIOR_PREFILL
