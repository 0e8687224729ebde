"""Streams and events of the asynchronous platform, without torch and without SGLang."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace

import device as streams
import pytest
from device import Delays, Device, Stream


@pytest.fixture
def device() -> Iterator[Device]:
    """Nothing is visible before it is awaited."""
    made = Device(
        Delays(mode="all-late", horizon_s=1000.0), lambda *what, **_: pytest.fail(str(what))
    )
    streams.install(SimpleNamespace(), made)
    yield made
    made.synchronize()


def test_eager_stream_moves_only_the_awaited_bytes(device: Device) -> None:
    fence, copies = (Stream(of=device, name=name, lazy=True) for name in ("d2h", "h2d"))
    eager, log = Stream(of=device, name="forward"), []
    fence.copy(lambda: log.append("fence"))
    copies.wait_stream(fence)
    events = []
    for layer in range(3):
        copies.copy(lambda layer=layer: log.append(layer))
        events.append(copies.record_event())
    eager.wait_event(events[1])
    assert log == ["fence", 0, 1], "in order, and what they wait for themselves"
    assert not any(event.query() for event in events), "to see them is another matter"


@pytest.mark.parametrize("seed", [1, 2])
def test_any_operations_keep_stream_order_without_blocking(device: Device, seed: int) -> None:
    device.delays = Delays(seed=seed, horizon_s=0.01, typical_s=0.002)
    source = random.Random(seed)
    all_streams = [Stream(of=device, name=f"x{number}", lazy=number < 3) for number in range(5)]
    logs: list[list[int]] = [[] for _ in all_streams]
    counts, events = [0] * 5, []
    for _ in range(4000):
        number, what = source.randrange(5), source.random()
        stream = all_streams[number]
        if what < (0.4 if stream.lazy else 0.1):
            counts[number] += 1
            queue = stream.copy if stream.lazy else stream.busy
            queue(lambda n=number, value=counts[number]: logs[n].append(value))
        elif 0.5 <= what < 0.7:
            events.append(stream.record_event())
        elif 0.7 <= what < 0.9 and events:
            stream.wait_event(source.choice(events[-20:]))
        elif 0.9 <= what < 0.95:
            stream.wait_stream(source.choice(all_streams))
        elif what >= 0.95 and events:
            source.choice(events).synchronize()
    device.synchronize()
    assert logs == [list(range(1, count + 1)) for count in counts]
    assert all(event.query() for event in events)
    assert all(len(stream.tasks) <= streams.KEPT_TASKS + 1 for stream in all_streams)
