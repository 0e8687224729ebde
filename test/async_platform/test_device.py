"""Streams and events of the asynchronous platform, without torch and without SGLang."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import device as streams
import pytest
from device import Delays, Device, Event, Stream, current_stream

from kit.waiting import eventually

LONG_S = 30.0
"""Longer than a test may take: a task that is visible earlier was awaited."""


@dataclass(frozen=True)
class Fixed(Delays):
    """Each kind of stream has one delay; none by default."""

    by_kind: dict[str, float] = field(default_factory=dict)

    def of(self, rank: int, kind: str, ordinal: int) -> float:
        return self.by_kind.get(kind, 0.0)


class Made(SimpleNamespace):
    device: Device
    found: list[str]
    module: Any

    def stream(self, name: str, *, lazy: bool = True) -> Stream:
        return Stream(of=self.device, name=name, lazy=lazy)


Make = Callable[..., Made]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Made] = []

    def make(delays: Delays | None = None, **by_kind: float) -> Made:
        delays = Fixed(by_kind=by_kind) if delays is None else delays
        found: list[str] = []
        device = Device(delays, lambda what, **details: found.append(what))
        module = SimpleNamespace()
        streams.install(module, device)
        made.append(Made(device=device, found=found, module=module))
        return made[-1]

    yield make
    for one in made:
        one.device.synchronize()
        one.device.close()


def recorded(stream: Stream) -> Event:
    return stream.record_event(Event(enable_timing=True))


def test_unrecorded_event_is_done_and_delays_no_wait(make: Make) -> None:
    made = make(d2h=LONG_S)
    event, stream = Event(), made.stream("d2h")
    assert event.query()
    event.synchronize()
    stream.wait_event(event)
    assert stream.query()


def test_wait_ignores_a_later_recording_of_its_event(
    make: Make,
) -> None:
    made = make(first=0.0, second=0.0, slow=LONG_S)
    first, second, slow = made.stream("first"), made.stream("second"), made.stream("slow")
    event, log = Event(), []
    event.record(first)
    second.wait_event(event)
    slow.copy(lambda: log.append("slow"))
    event.record(slow)
    second.copy(lambda: log.append("second"))
    eventually(second.query)
    assert log == ["second"] and not event.query()


def test_each_thread_has_a_stream_of_its_own(make: Make) -> None:
    made = make()
    mine, seen = made.stream("mine"), []
    with made.module.stream(mine):
        thread = threading.Thread(target=lambda: seen.append(current_stream()))
        thread.start()
        thread.join()
        assert current_stream() is mine
        with made.module.stream(None):
            assert current_stream() is mine
    assert seen == [made.device.default] and current_stream() is made.device.default


def test_eager_stream_moves_only_the_awaited_bytes(make: Make) -> None:
    made = make(h2d=LONG_S, d2h=LONG_S)
    copies, log = made.stream("h2d"), []
    eager = made.stream("forward", lazy=False)
    fence = made.stream("d2h")
    fence.copy(lambda: log.append("fence"))
    copies.wait_stream(fence)
    events = []
    for layer in range(3):
        copies.copy(lambda layer=layer: log.append(layer))
        events.append(recorded(copies))
    eager.wait_event(events[1])
    assert log == ["fence", 0, 1], "in order, and what they wait for themselves"
    assert not any(event.query() for event in events), "to see them is another matter"
    assert made.device.counts == {"demanded": 3}


def test_eager_computation_follows_the_loads_it_awaited(make: Make) -> None:
    made = make(h2d=LONG_S, forward=0.0)
    copies, eager = made.stream("h2d"), made.stream("forward", lazy=False)
    copies.copy(lambda: None)
    eager.wait_event(recorded(copies))
    eager.busy()
    done = recorded(eager)
    assert not done.query()
    copies.synchronize()
    eventually(done.query)


def test_waiting_host_makes_awaited_work_due(make: Make) -> None:
    made = make(h2d=LONG_S, d2h=LONG_S, forward=LONG_S)
    copies, fence = made.stream("h2d"), made.stream("d2h")
    log: list[str] = []
    fence.copy(lambda: log.append("fence"))
    copies.wait_stream(fence)
    copies.copy(lambda: log.append("copy"))
    event = recorded(copies)
    fence.copy(lambda: log.append("later"))
    begun = time.monotonic()
    event.synchronize()
    assert time.monotonic() - begun < LONG_S / 2
    assert log == ["fence", "copy"] and event.query()


def test_elapsed_time_between_events_is_device_time(make: Make) -> None:
    made = make(d2h=0.02)
    stream = made.stream("d2h")
    first = recorded(stream)
    stream.copy(lambda: None)
    last = recorded(stream)
    with pytest.raises(RuntimeError, match="recorded and done"):
        first.elapsed_time(last)
    eventually(last.query)
    assert first.elapsed_time(last) >= 20
    with pytest.raises(RuntimeError, match="enable_timing"):
        first.elapsed_time(stream.record_event())


def test_wait_orders_work_through_other_streams_too(make: Make) -> None:
    made = make(d2h=LONG_S, forward=LONG_S, h2d=LONG_S)
    a, b, c = made.stream("h2d"), made.stream("forward", lazy=False), made.stream("d2h")
    index = a.copy(lambda: None)
    b.wait_stream(a)
    assert b.clock[a] > index and a not in c.clock
    c.wait_stream(b)
    assert c.clock[a] == b.clock[a] and c.clock[b] == b.end


def test_unreferenced_stream_still_runs_its_copies(make: Make) -> None:
    made, log = make(d2h=0.02), []
    made.stream("d2h").copy(lambda: log.append("ran"))
    eventually(lambda: log == ["ran"])


def test_endless_wait_raises_with_all_streams_states(make: Make) -> None:
    made = make()
    stream = made.stream("d2h")
    never = streams.Record(Stream(of=made.device, name="never"), 1, {})
    stuck = streams.Task("wait", after=never)
    made.device.put(stream, stuck)
    record = streams.Record(stream, stream.end, {})
    with pytest.raises(RuntimeError, match=r"d2h: 0 visible.*next wait for never:1"):
        made.device.wait_until_visible(record, timeout_s=0.05)
    stuck.after = None


def test_delays_are_repeatable_and_differ_by_rank() -> None:
    drawn = [Delays(seed=3).of(0, "d2h", number) for number in range(200)]
    assert drawn == [Delays(seed=3).of(0, "d2h", number) for number in range(200)]
    assert drawn != [Delays(seed=3).of(1, "d2h", number) for number in range(200)]
    assert drawn != [Delays(seed=4).of(0, "d2h", number) for number in range(200)]
    assert 20 < drawn.count(0.0) < 80 and max(drawn) > 0.1 and max(drawn) <= 0.15


def test_modes_say_which_end_is_late() -> None:
    late, forward = Delays(mode="late"), Delays(mode="late-forward")
    assert {Delays(mode="all-late").of(0, kind, 1) for kind in ("d2h", "h2d", "x")} == {0.15}
    assert {late.of(0, "d2h", number) for number in range(9)} == {0.15}
    assert {forward.of(0, "forward", number) for number in range(9)} == {0.15}
    assert {forward.of(0, "d2h", number) for number in range(9)} == {0.0}
    with pytest.raises(ValueError, match="no mode 'sometimes'"):
        Delays(mode="sometimes")


@pytest.mark.parametrize("seed", [1, 2])
def test_any_operations_keep_stream_order_without_blocking(make: Make, seed: int) -> None:
    made = make(Delays(seed=seed, horizon_s=0.01, typical_s=0.002))
    source = random.Random(seed)
    all_streams = [made.stream(f"x{number}", lazy=number < 3) for number in range(5)]
    logs: list[list[int]] = [[] for _ in all_streams]
    counts, events = [0] * 5, []
    for _ in range(4000):
        number, what = source.randrange(5), source.random()
        stream = all_streams[number]
        if what < 0.4 and stream.lazy:
            counts[number] += 1
            stream.copy(lambda n=number, value=counts[number]: logs[n].append(value))
        elif what < 0.5 and not stream.lazy:
            counts[number] += 1
            stream.busy(lambda n=number, value=counts[number]: logs[n].append(value))
        elif what < 0.7:
            events.append(recorded(stream))
        elif what < 0.9 and events:
            stream.wait_event(source.choice(events[-20:]))
        elif what < 0.95:
            stream.wait_stream(source.choice(all_streams))
        elif events and what < 0.96:
            source.choice(events).synchronize()
    made.module.synchronize()
    assert logs == [list(range(1, count + 1)) for count in counts]
    assert all(event.query() for event in events) and made.found == []
    assert all(len(stream.tasks) <= streams.KEPT_TASKS + 1 for stream in all_streams)
