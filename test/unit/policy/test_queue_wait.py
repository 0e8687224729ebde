"""A request's wait is what is ahead of it, at the speed at which the queue really moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy.queue_wait import HALF_LIFE, QueueWait


def admit(queue: QueueWait[str], name: str, now: float) -> None:
    queue.leaves(name)
    queue.starts(name, now)


def test_first_guess_is_one_prefill_after_another() -> None:
    queue: QueueWait[str] = QueueWait()
    for number in range(5):
        assert queue.seconds(is_busy=True) == pytest.approx(0.1 * number)
        queue.arrives(str(number), 0.1, now=0.0)
    queue.leaves("0")
    assert queue.seconds("3", is_busy=True) == pytest.approx(0.2)  # of 1 and 2


@pytest.mark.parametrize("slowness", [0.25, 8.0])
def test_queue_that_moves_at_another_speed_is_noticed(slowness: float) -> None:
    """Batches hold several requests; full memory or running decodes hold all of them up."""
    queue: QueueWait[str] = QueueWait()
    now = 0.0
    for number in range(8 * HALF_LIFE):
        queue.arrives(str(number), 0.1, now)
        queue.arrives(f"{number}/behind", 0.1, now)
        admit(queue, str(number), now)
        now += 0.1 * slowness
        admit(queue, f"{number}/behind", now)
    queue.arrives("ahead", 0.1, now)
    assert queue.seconds(is_busy=True) == pytest.approx(0.1 * slowness, rel=0.1)


def test_running_batch_delays_even_the_first() -> None:
    queue: QueueWait[str] = QueueWait()
    for number in range(HALF_LIFE):
        queue.arrives(str(number), 0.1, float(number))
        admit(queue, str(number), number + 0.5)
    assert queue.seconds(is_busy=True) == pytest.approx(0.5)
    assert queue.seconds(is_busy=False) == 0.0


def test_wait_for_a_load_teaches_nothing() -> None:
    queue: QueueWait[str] = QueueWait()
    queue.arrives("loads", 0.1, 0.0)
    queue.waits_for_more("loads")
    admit(queue, "loads", 60.0)
    assert queue.seconds(is_busy=True) == 0.0


def test_higher_priority_waits_for_its_equals_alone() -> None:
    queue: QueueWait[str] = QueueWait()
    queue.arrives("low", 5.0, 0.0, rank=1)
    queue.arrives("high", 0.1, 0.0, rank=-1)
    queue.arrives("middle", 0.2, 0.0)
    assert queue.seconds(is_busy=False, rank=-1) == pytest.approx(0.1)
    assert queue.seconds("high", is_busy=False) == 0.0
    assert queue.seconds("low", is_busy=False) == pytest.approx(0.3)
    assert queue.order("high") < queue.order("middle") < queue.order("low")


@given(
    st.lists(
        st.tuples(st.sampled_from(["arrives", "again", "leaves", "starts"]), st.integers(0, 7)),
        max_size=60,
    ),
    st.booleans(),
)
def test_books_of_the_queue_balance(events: list[tuple[str, int]], has_ranks: bool) -> None:
    queue: QueueWait[int] = QueueWait()
    waiting: dict[int, float] = {}
    for now, (event, request) in enumerate(events):
        if event in ("arrives", "again"):
            own_s = 0.1 if event == "arrives" else 0.3
            queue.arrives(request, own_s, float(now), rank=request % 3 if has_ranks else 0)
            waiting[request] = own_s
        elif event == "leaves":
            queue.leaves(request)
            waiting.pop(request, None)
        else:
            queue.starts(request, float(now))
        assert len(queue) == len(waiting)
        assert queue.total_s == pytest.approx(sum(waiting.values()))
        assert all(queue.own_s(each) == own_s for each, own_s in waiting.items())
        bound_s = queue.seconds(is_busy=True, rank=9)
        assert all(0 <= queue.seconds(each, is_busy=True) <= bound_s + 1e-9 for each in waiting)
