"""The one thread of an endpoint: it owns the sockets, so they need no lock.

Calls from other threads are queued and run here in order; readable sockets are served, control
before data. Then the endpoint does one step of its work, so that an abort never waits behind more
than one slab.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable


TICK_S = 0.25
GOODBYE_MS = 200
"""The time that a last message has to leave the machine before its socket is closed."""

logger = logging.getLogger(__name__)


class EndpointLoop:
    """Runs ``tick`` every ``TICK_S``, and ``step``, which returns in how many seconds it has more
    to do (None: when a message comes)."""

    def __init__(
        self, name: str, step: Callable[[], float | None], tick: Callable[[float], None]
    ) -> None:
        self._step = step
        self._ticks = [tick]
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._wake: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()  # guards the file number, which is reused once closed
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._handlers: dict[zmq.Socket[bytes] | int, Callable[[], None]] = {}
        self._stopping = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after the calls queued so far. Not on its own thread."""
        self.call(self._request_stop)
        self._stopped.wait(timeout_s)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function on the loop's thread, soon and in order. Any thread; never blocks."""
        with self._wake_lock:
            if self._wake is None:
                return
            self._calls.append((function, arguments))
            with contextlib.suppress(BlockingIOError):  # already awake
                os.eventfd_write(self._wake, 1)

    def add_tick(self, tick: Callable[[float], None]) -> None:
        """Run this too, for another endpoint of the same thread. Loop thread only."""
        self._ticks.append(tick)

    def add_socket(self, socket: zmq.Socket[bytes] | int, handler: Callable[[], None]) -> None:
        """Serve a socket, of ZeroMQ or by its file number: ``handler`` reads what is there without
        blocking. Loop thread only."""
        self._handlers[socket] = handler
        self._poller.register(socket, zmq.POLLIN)

    def remove_socket(self, socket: zmq.Socket[bytes], linger_ms: int = 0) -> None:
        """Stop serving a socket and close it; its last messages have ``linger_ms`` to go out, in
        the background. Loop thread only."""
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)
        socket.close(linger=linger_ms)

    def _run(self) -> None:
        next_tick = time.monotonic()
        wanted_s: float | None = None
        try:
            while not self._stopping:
                wait_s = max(0.0, next_tick - time.monotonic())
                wait_s = wait_s if wanted_s is None else min(wait_s, wanted_s)
                ready = self._poller.poll(math.ceil(wait_s * 1000))
                self._guard(self._run_calls)
                for socket, _ in ready:
                    handler = self._handlers.get(socket)  # an earlier handler may have removed it
                    if handler is not None:
                        self._guard(handler)
                wanted_s = self._guard(self._step)
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    for tick in self._ticks:
                        self._guard(tick, now)
        finally:
            for socket in list(self._handlers):
                if isinstance(socket, zmq.Socket):
                    self.remove_socket(socket)
            with self._wake_lock:
                if self._wake is not None:
                    os.close(self._wake)
                self._wake = None
            self._stopped.set()

    def _run_calls(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):  # nothing was called
                os.eventfd_read(self._wake)
        while self._calls:
            function, arguments = self._calls.popleft()
            self._guard(function, *arguments)

    def _guard(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function and log its errors: they must not end the thread."""
        try:
            return function(*arguments)
        except Exception:
            name = self._thread.name
            logger.exception("internal error in the thread %s; it goes on", name)
            return None

    def _request_stop(self) -> None:
        self._stopping = True
