"""Streams, events and copies that end late, in place of the empty ones torch has for a CPU.

A task of a stream has two times: its *effect*, when bytes move, and when it is *visible*, that is,
when events behind it are True. On a GPU they are one; here a forward runs within its launch, so
they are kept apart.

- On a *lazy* stream waits and copies are queued. A copy reads its source and writes its destination
  when it runs: when it is due, when a thread waits for it, or when an eager stream needs it.
- What is computed on an *eager* stream, any other, has run when its call returns. Waiting for an
  event there demands the effects of everything before that event, on the calling thread and no
  sooner; their time of visibility does not change. A reader that does not wait reads old bytes.
- A thread that waits for an event makes everything that the event depends on due at once: only a
  scheduler that continues sees late tasks. A daemon thread makes tasks visible when they are due.

Nothing here knows SGLang. One lock guards all streams of a ``Device``; effects run under it and
must take no other lock. ``Event.query`` takes none.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
import weakref
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

STUCK_S = 60.0
"""A host thread that waited so long for an event never would see it."""
KEPT_TASKS = 512
"""Visible tasks that a stream may hold before they are dropped."""


@dataclass(frozen=True)
class Delays:
    """How long a task stays invisible: a function of its stream's kind and its number in it, so
    that the same operations get the same delays. Times are seconds."""

    seed: int = 0
    mode: str = "random"
    horizon_s: float = 0.15
    typical_s: float = 0.02

    def number(self, *names: object) -> int:
        """32 bits that depend on the seed and the names only."""
        text = "/".join(map(str, (self.seed, *names)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")

    def of(self, rank: int, kind: str, ordinal: int) -> float:
        """Random: a quarter none, half short, a quarter half the horizon or more."""
        if self.mode == "all-late" or (self.mode == "late" and kind == "d2h"):
            return self.horizon_s
        if self.mode == "late-forward" and kind in ("forward", "d2h"):
            return self.horizon_s if kind == "forward" else 0.0
        quarter = self.number(rank, kind, ordinal, "quarter") % 4
        share = self.number(rank, kind, ordinal, "share") / 2**32
        if quarter == 0:
            return 0.0
        return self.horizon_s * (1 + share) / 2 if quarter == 3 else self.typical_s * share


@dataclass(eq=False, slots=True)
class Record:
    """One recording of an event: a point of a stream, and what was known there of the others."""

    stream: Stream
    index: int
    clock: dict[Stream, int]
    time: float = 0.0

    @property
    def visible(self) -> bool:
        return self.stream.visible >= self.index


@dataclass(eq=False, slots=True)
class Task:
    """What a stream does next. ``after``: a record of another stream that must come first."""

    label: str
    effect: Callable[[], None] | None = None
    after: Record | None = None
    mark: Record | None = None
    due: float = 0.0
    on_visible: Callable[[], None] | None = None


@dataclass(eq=False)
class Device:
    """All streams of a process. ``report`` takes a violation, perhaps under the lock."""

    delays: Delays = field(default_factory=Delays)
    report: Callable[..., None] = lambda what, **details: None
    rank: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._busy: set[Stream] = set()  # with tasks that are not visible; kept alive by it
        self._thread: threading.Thread | None = None
        self.default = Stream(of=self, name="default")

    def put(self, stream: Stream, task: Task) -> int:
        """Queue a task; its index in the stream, from 1 on. It may be visible on return."""
        with self.lock:
            stream.tasks.append(task)
            index = stream.end
            self._busy.add(stream)
            self._settle(stream)
            if self._busy:
                self._start_thread()
                self._changed.notify_all()
            return index

    def demand(self, stream: Stream, index: int) -> None:
        """Have the bytes of everything up to a point moved now. Visible it becomes in its time."""
        with self.lock:
            pending = [(stream, index)]
            while pending:
                stream, index = pending[-1]
                if stream.effected >= index:
                    pending.pop()
                    continue
                task = stream.task(stream.effected)
                after = task.after
                if after is not None and after.stream.effected < after.index:
                    pending.append((after.stream, after.index))
                else:
                    self._run_effect(stream, task)

    def expedite(self, record: Record) -> None:
        """Let nothing that a record depends on wait for its time any longer."""
        with self.lock:
            pending = [record]
            while pending:
                record = pending.pop()
                stream = record.stream
                start = max(stream.visible, stream.expedited)
                stream.expedited = max(stream.expedited, record.index)
                for position in range(start, min(record.index, stream.end)):
                    task = stream.task(position)
                    task.due = 0.0
                    if task.after is not None and not task.after.visible:
                        pending.append(task.after)

    def wait_until_visible(self, record: Record, timeout_s: float = STUCK_S) -> None:
        """Block the calling thread. Raises ``RuntimeError``."""
        if record.visible:
            return
        with self.lock:
            self.expedite(record)
            self._settle_all()
            deadline = time.monotonic() + timeout_s
            while not record.visible:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    states = {s.name: (s.visible, s.effected, s.end) for s in self._streams}
                    raise RuntimeError(f"waited in vain for {record.stream.name}: {states}")
                self._changed.wait(left_s)

    def synchronize(self) -> None:
        """Wait until everything queued so far is visible."""
        for stream in list(self._streams):
            stream.synchronize()

    def _run_effect(self, stream: Stream, task: Task) -> None:
        stream.effected += 1
        effect, task.effect = task.effect, None
        try:
            if effect is not None:
                effect()
        except Exception as error:
            self.report("copy-failed", label=task.label, error=repr(error))

    def _settle(self, stream: Stream) -> bool:
        """Make visible what is due. True if there was anything."""
        before, now = stream.visible, time.monotonic()
        while stream.visible < stream.end:
            task = stream.task(stream.visible)
            if task.due > now or (task.after is not None and not task.after.visible):
                break
            if stream.effected <= stream.visible:
                self._run_effect(stream, task)
            if task.mark is not None:
                task.mark.time = now  # before a thread can see that it is visible
            stream.visible += 1
            if task.on_visible is not None:
                task.on_visible()
        if stream.visible == stream.end:
            self._busy.discard(stream)
        stream.drop_visible()
        return stream.visible > before

    def _settle_all(self) -> None:
        moved = False
        while sum(self._settle(stream) for stream in list(self._busy)):
            moved = True
        if moved:
            self._changed.notify_all()

    def _next_due(self) -> float | None:
        heads = [stream.task(stream.visible) for stream in self._busy]
        dues = [task.due for task in heads if task.after is None or task.after.visible]
        return min(dues, default=None)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="async-device", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with self.lock:
            while True:
                self._settle_all()
                due = self._next_due()
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))


class Stream:
    """As ``torch.cuda.Stream``. ``lazy`` and ``kind`` are set by who knows what it is for."""

    def __init__(
        self,
        *_: object,
        of: Device | None = None,
        name: str | None = None,
        lazy: bool = False,
        **more: object,
    ) -> None:
        self.owner = installed() if of is None else of
        self.lazy = lazy
        self.kind = name or "other"
        self.tasks: deque[Task] = deque()
        self.num_dropped = self.effected = self.visible = self.expedited = 0
        self.clock: dict[Stream, int] = {}
        """How far the streams are that this one has waited for: they happened before."""
        self._num_delayed = 0
        self.cuda_stream = id(self)
        self.name = name or f"stream-{id(self):x}"
        with self.owner.lock:
            self.owner._streams.add(self)

    def called(self, kind: str, *, lazy: bool) -> None:
        """Say what the stream is for: its delays go by that."""
        self.kind = self.name = kind
        self.lazy = lazy

    @property
    def end(self) -> int:
        return self.num_dropped + len(self.tasks)

    def task(self, position: int) -> Task:
        return self.tasks[position - self.num_dropped]

    def drop_visible(self) -> None:
        if self.visible - self.num_dropped > KEPT_TASKS:
            while self.num_dropped < self.visible:
                self.tasks.popleft()
                self.num_dropped += 1

    def _delayed(self, label: str, effect: Callable[[], None] | None, **more: Any) -> int:
        self._num_delayed += 1
        delay = self.owner.delays.of(self.owner.rank, self.kind, self._num_delayed)
        task = Task(label, effect, due=time.monotonic() + delay, **more)
        index = self.owner.put(self, task)
        self.clock[self] = index
        return index

    def copy(self, effect: Callable[[], None], label: str = "copy", on_visible: Any = None) -> int:
        """Queue a copy, or make it now where the stream is eager. Its index."""
        with self.owner.lock:
            index = self._delayed(label, effect, on_visible=on_visible)
            if not self.lazy:
                self.owner.demand(self, index)
            return index

    def busy(self, effect: Callable[[], None] | None = None, label: str = "busy") -> int:
        """Queue the rest of a computation, which a device would still be at, and return its index.
        ``effect``: bytes that must not be seen before it is demanded."""
        with self.owner.lock:
            return self._delayed(label, effect)

    def wait_event(self, event: Event) -> None:
        """What comes next on this stream comes after the event as it was recorded last."""
        record = event.record_of_last
        if record is None:
            return
        with self.owner.lock:
            for stream, index in record.clock.items():
                self.clock[stream] = max(self.clock.get(stream, 0), index)
            if record.stream is self:
                return
            if not self.lazy:
                self.owner.demand(record.stream, record.index)
            if not record.visible:
                self.owner.put(self, Task("wait", after=record))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block the calling thread until everything queued so far is visible."""
        self.record_event().synchronize()

    def query(self) -> bool:
        return self.visible >= self.end


class Event:
    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self.record_of_last: Record | None = None
        self._has_timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """A wait from now on is for what is queued on the stream now."""
        stream = current_stream() if stream is None else stream
        with stream.owner.lock:
            record = Record(stream, stream.end + 1, dict(stream.clock))
            record.clock[stream] = stream.clock[stream] = record.index
            self.record_of_last = record
            stream.owner.put(stream, Task("mark", mark=record))

    def query(self) -> bool:
        return self.record_of_last is None or self.record_of_last.visible

    def synchronize(self) -> None:
        if (record := self.record_of_last) is not None:
            record.stream.owner.wait_until_visible(record)

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events that are done and keep time."""
        first, last = self.record_of_last, end.record_of_last
        if not (self._has_timing and end._has_timing and first and last):
            raise RuntimeError("both events must be recorded, with enable_timing=True")
        return (last.time - first.time) * 1000.0


_current = threading.local()
_installed: Device | None = None


def installed() -> Device:
    assert _installed is not None, "no device is installed"
    return _installed


def current_stream(device: object = None) -> Stream:
    stream: Stream | None = getattr(_current, "stream", None)
    return installed().default if stream is None else stream


class StreamContext(AbstractContextManager[None]):
    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._previous: list[Stream | None] = []

    def __enter__(self) -> None:
        self._previous.append(getattr(_current, "stream", None))
        _current.stream = self.stream or self._previous[-1]

    def __exit__(self, *_: object) -> None:
        _current.stream = self._previous.pop()


def synchronize(device: object = None) -> None:
    installed().synchronize()


def install(module: Any, device: Device) -> None:
    """Put streams and events into ``torch.cpu``, or what stands for it in a test. What is queued
    at the end of the process becomes visible then, so that a late failure shows."""
    global _installed  # noqa: PLW0603 - torch has one module of streams too
    _installed = device
    _current.stream = None
    for each in (Stream, Event, StreamContext, current_stream, synchronize):
        setattr(module, each.__name__, each)
    module.stream = StreamContext
    atexit.register(device.synchronize)
