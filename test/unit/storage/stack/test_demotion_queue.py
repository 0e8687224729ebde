"""What goes down first, and that the books of the queue balance whatever comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.storage.stack.demotion import DemotionQueue, StackSettings

TENANT = b"t" * 16


def make_queue(max_keys: int = 100, now: list[float] | None = None) -> DemotionQueue:
    now = [0.0] if now is None else now
    settings = StackSettings(max_queued_keys=max_keys, max_tries=3, retry_s=5.0)
    return DemotionQueue(settings, lambda: now[0])


def keys(first: int, number: int) -> tuple[bytes, ...]:
    return tuple(index.to_bytes(32, "big") for index in range(first, first + number))


def taken(queue: DemotionQueue) -> list[tuple[bytes, ...]]:
    chains = []
    while (chain := queue.take()) is not None:
        chains.append(chain.keys)
    return chains


def test_what_came_back_goes_first_then_the_oldest() -> None:
    queue = make_queue()
    for first in (0, 10, 20, 30):
        queue.add(keys(first, 4), TENANT)
    queue.touch(keys(18, 6))  # the chain at 20 is in it
    assert taken(queue) == [keys(20, 4), keys(0, 4), keys(10, 4), keys(30, 4)]
    assert queue.num_keys == 0


def test_a_chain_is_queued_once_at_its_longest() -> None:
    queue = make_queue()
    queue.add(keys(0, 4), TENANT, returned=True)
    queue.add(keys(0, 2), TENANT)
    queue.add(keys(0, 6), TENANT)
    assert queue.num_keys == 6
    chain = queue.take()
    assert chain is not None and chain.keys == keys(0, 6) and chain.returned
    assert queue.take() is None


def test_what_does_not_fit_is_refused_and_noted() -> None:
    """But what was interrupted has the room that it had, and is the next."""
    queue = make_queue(max_keys=6)
    queue.add(keys(20, 2), TENANT)
    paused = queue.take()
    assert paused is not None and queue.failed(paused.keys, paused)
    assert queue.add(keys(0, 4), TENANT)
    assert not queue.add(keys(10, 4), TENANT)
    assert queue.overflowed and queue.num_free == 0
    chain = queue.take()
    assert chain is not None and queue.add(keys(10, 4), TENANT)
    queue.overflowed = False
    assert not queue.failed(chain.keys, chain) and queue.overflowed, "no walk looks for it"
    queue.overflowed = False
    queue.interrupted(chain.keys[1:], chain)
    assert not queue.overflowed and queue.num_free == 0
    assert taken(queue) == [keys(1, 3), keys(10, 4)]


def test_a_failed_chain_pauses_longer_then_ends() -> None:
    now = [0.0]
    queue = make_queue(now=now)
    queue.add(keys(0, 4), TENANT)
    for pause_s in (5.0, 20.0):
        chain = queue.take()
        assert chain is not None
        assert queue.failed(chain.keys[1:], chain)
        now[0] += pause_s - 0.1
        assert queue.take() is None
        now[0] += 0.1
    chain = queue.take()
    assert chain is not None and chain.keys == keys(2, 2)
    assert not queue.failed(chain.keys, chain), "it was tried three times"
    assert queue.num_keys == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "touch", "take", "fail", "back"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_the_books_balance(events: list[tuple[str, int]]) -> None:
    now = [0.0]
    queue = make_queue(max_keys=12, now=now)
    for name, number in events:
        now[0] += 3.0
        if name == "add":
            queue.add(keys(10 * number, number % 4 + 1), TENANT)
        elif name == "touch":
            queue.touch(keys(10 * number, 2))
        else:
            chain = queue.take()
            if chain is not None and name == "fail":
                queue.failed(chain.keys, chain)
            elif chain is not None and name == "back":
                queue.interrupted(chain.keys, chain)
        assert [each.due for each in queue._failed] == sorted(each.due for each in queue._failed)
        held = [*queue._failed, *queue._returned.values(), *queue._fresh.values()]
        assert queue.num_keys == sum(len(chain.keys) for chain in held)
        assert not queue._returned.keys() & queue._fresh.keys()
