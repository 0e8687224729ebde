"""What clients, operator and checks of one server life share: its servers, what was asked of them,
and the record of what was done."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conversations import Asked, Conversations
from world import DEADLINE_S

if TYPE_CHECKING:
    from clients import Answers
    from world import World

NUM_RECENT = 60
LOOK_S = 0.1


class Violation(AssertionError):
    """Something that must never be."""


@dataclass
class Record:
    """Counts over all lives, and the last actions. Any thread."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, group: str, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts.setdefault(group, Counter())[name] += number

    def did(self, what: str) -> None:
        with self._lock:
            self.recent.append(f"{time.monotonic() - self.began:8.2f} s  {what}")

    def say(self, line: str) -> None:
        with self._lock:
            totals = {group: counted.total() for group, counted in self.counts.items()}
        print(f"{time.strftime('%H:%M:%S')} {line} {totals}", flush=True)


class Traffic:
    """Lets requests through, or waits until none is under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open, self._active = True, 0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_open, 2 * DEADLINE_S), "never let in"
            self._active += 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self, *, waits: bool) -> Iterator[None]:
        """No request begins, and where it waits none is under way."""
        with self._changed:
            self._is_open = False
            if waits:
                ended = self._changed.wait_for(lambda: not self._active, DEADLINE_S)
                assert ended, f"{self._active} requests do not end"
        try:
            yield
        finally:
            with self._changed:
                self._is_open = True
                self._changed.notify_all()


@dataclass
class Life:
    """Of the servers of one setup."""

    world: World
    answers: Answers
    record: Record
    models: dict[str, Path]  # by weights
    conversations: Conversations = field(default_factory=Conversations)
    traffic: Traffic = field(default_factory=Traffic)
    ends: threading.Event = field(default_factory=threading.Event)
    errors: list[BaseException] = field(default_factory=list)
    weights: str = "first"
    num_updates: int = 0  # begun and ended, so an odd number is under way
    _num_disturbing: int = 0
    _disturbed_at: float = 0.0

    def __post_init__(self) -> None:
        self.asked = Asked(self.world.setup.page)

    @contextlib.contextmanager
    def disturbance(self) -> Iterator[None]:
        """Requests may fail that are under way meanwhile."""
        self._num_disturbing += 1
        try:
            yield
        finally:
            self._num_disturbing -= 1
            self._disturbed_at = time.monotonic()

    def was_disturbed(self, since: float) -> bool:
        return bool(self._num_disturbing) or self._disturbed_at >= since

    def until(self, trouble: Callable[[], Any], what: str) -> None:
        """Until there is no trouble."""
        deadline = time.monotonic() + DEADLINE_S
        while found := trouble():
            if time.monotonic() >= deadline:
                raise Violation(f"{found} {what} after {DEADLINE_S:.0f} s")
            time.sleep(LOOK_S)

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self.ends.set()
