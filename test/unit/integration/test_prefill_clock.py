"""A batch's time is its own: not its queue's, not the batch before's, not a copy's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_tiered.integration.load_scheduling import LoadingRadixCache
from sglang_tiered.integration.prefill_clock import PrefillClock


class Cache(LoadingRadixCache):
    """Only what the clock tells."""

    def __init__(self) -> None:
        self.told: list[tuple[list[tuple[int, int]], float]] = []

    def note_batch(self, spans: list[tuple[int, int]], seconds: float) -> None:
        self.told.append((spans, seconds))


def make_batch(device: str, *, extends: bool = True, consumer: int = -1) -> Any:
    return SimpleNamespace(
        device=device,
        launch_ts=None,
        hicache_consumer_index=consumer,
        forward_mode=SimpleNamespace(is_extend=lambda: extends),
        extend_lens=[100, 1],
        prefix_lens=[0, 900],
    )


class Machine:
    """A scheduler whose batches take the times they are given."""

    def __init__(self) -> None:
        self.now = 10.0
        self.tree_cache = Cache()
        self.clock = PrefillClock(lambda: self.now)

    def launch(self, batch: Any, takes_s: float) -> None:
        def run(scheduler: Machine, batch: Any) -> None:
            batch.launch_ts = scheduler.now
            scheduler.now += takes_s

        self.clock.around_run(run, self, batch)

    def process(self, batch: Any, ends_at: float) -> None:
        def process(scheduler: Machine, batch: Any, result: Any) -> None:
            scheduler.now = max(scheduler.now, ends_at)

        self.clock.around_result(process, self, batch, None)

    @property
    def told(self) -> list[tuple[list[tuple[int, int]], float]]:
        return self.tree_cache.told


SPANS = [(100, 0), (1, 900)]


def test_on_a_cpu_a_batch_takes_what_its_launch_takes() -> None:
    machine = Machine()
    batch = make_batch("cpu")
    machine.launch(batch, 0.5)
    machine.process(batch, ends_at=99.0)
    assert machine.told == [(SPANS, 0.5)]


def test_on_an_accelerator_a_batch_does_not_pay_for_the_one_before() -> None:
    machine = Machine()
    first, second = make_batch("cuda"), make_batch("cuda")
    machine.launch(first, 0.0)
    machine.launch(second, 0.0)
    machine.process(first, ends_at=12.0)
    machine.process(second, ends_at=15.0)
    assert machine.told == [(SPANS, 2.0), (SPANS, 3.0)]


def test_decodes_and_batches_that_wait_for_copies_teach_nothing() -> None:
    machine = Machine()
    for batch in (make_batch("cpu", extends=False), make_batch("cpu", consumer=0)):
        machine.launch(batch, 0.5)
        machine.process(batch, ends_at=20.0)
    assert machine.told == []


def test_a_stock_cache_is_left_alone() -> None:
    machine = Machine()
    machine.tree_cache = SimpleNamespace()  # type: ignore[assignment]
    machine.launch(make_batch("cpu"), 0.5)
