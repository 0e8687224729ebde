"""``SpillQueue``: in which order, and how fast, host pages are written to NVMe.

Nodes of the radix tree wait here from the moment their host copy is complete until their store
begins. While the disk is idle that is the same moment. Under load three rules apply.

- **Little in flight.** A store that was handed over pins its host pages and can no longer be
  reordered. So only as much is handed over as the disk takes in about ``TARGET_WAIT_S``. The limit
  doubles whenever the disk ran dry and halves when a store waited longer, like the congestion
  window of TCP, within ``MIN_SHARE`` and ``MAX_SHARE`` of the host tier.
- **Loads first.** While loads are under way, stores hold until the waiting tokens pass the low
  watermark or the oldest has waited ``MAX_HOLD_S``. Then they go one at a time, and above the high
  watermark as fast as without loads.
- **What came back goes first**, then what waited longest. Take the Mooncake conversation trace, a
  host tier of 1% of its blocks and a disk that can take 0.3 of the writes. Then 22.5% of the blocks
  are hits with this order, 17.9% in order of arrival, 18.9% newest first and 21.8% longest first.
  With 0.6 and 0.9 of the writes the differences shrink, and no other order was better by more than
  0.3.

Pure bookkeeping for one scheduler: no I/O, not thread-safe, the clock is passed in. Sizes are
tokens. Every node that was added leaves exactly once: taken (``take_next_node``), evicted
(returned by ``add_node``), discarded or cleared by the caller.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable


Node = TypeVar("Node")

TARGET_WAIT_S = 0.5
MIN_FLIGHTS = 2
"""One is written and one follows, or the disk would idle until the scheduler's next step."""

MIN_SHARE, MAX_SHARE = 1 / 64, 1 / 8
LOW_SHARE, HIGH_SHARE = 1 / 32, 1 / 8
MAX_HOLD_S = 1.0

MAX_WAITING = 16_384
"""Nodes; about 300 bytes each. Beyond it the least valuable is evicted."""


@dataclass(slots=True)
class NodeStore(Generic[Node]):
    """Describes the store of a node, as the node was when it was offered."""

    node: Node
    path_start: int
    path_end: int
    num_retries: int = 0
    since: float = 0.0  # it waits; or, once it was dropped, until when it is not offered again

    @property
    def num_tokens(self) -> int:
        return self.path_end - self.path_start


class SpillQueue(Generic[Node]):
    """Owns "under way" for the stores of one scheduler: the dirty nodes that wait, and the stores
    that were handed over, by operation. Whether a node's store is under way is asked here."""

    def __init__(self, host_tokens: int, clock: Callable[[], float]) -> None:
        self._host_tokens = host_tokens
        self._clock = clock
        # By value: what came back before what did not; oldest first in each.
        self._waiting: tuple[OrderedDict[Node, NodeStore[Node]], ...]
        self._waiting = OrderedDict(), OrderedDict()
        self.waiting_tokens = 0
        self._flights: dict[int, NodeStore[Node]] = {}
        self._num_flights_of: Counter[Node] = Counter()
        self.flight_tokens = 0
        # What may be in flight; ``MIN_FLIGHTS`` larger stores always may.
        self.limit_tokens = host_tokens * MIN_SHARE
        self._shrunk_at = clock() - TARGET_WAIT_S

    # ---- What waits ----

    def __len__(self) -> int:
        return len(self._waiting[0]) + len(self._waiting[1])

    def __contains__(self, node: Node) -> bool:
        return node in self._waiting[0] or node in self._waiting[1]

    def waiting(self) -> list[Node]:
        """Return the nodes that wait."""
        return [node for waiting in self._waiting for node in waiting]

    def is_under_way(self, node: Node) -> bool:
        """Whether a node waits for its store, or for the end of it."""
        return node in self or node in self._num_flights_of

    def add_node(self, store: NodeStore[Node], *, returned: bool) -> Node | None:
        """Let a node wait; return the node that is evicted for it, if one is.

        ``returned`` says that its content was used again, or computed again after it was lost. A
        node that waits already keeps its place, or gets a better one, and its store is this one.
        """
        node = store.node
        if node in self:
            waiting = self._waiting[node in self._waiting[1]]
            self.waiting_tokens += store.num_tokens - waiting[node].num_tokens
            store.since = waiting[node].since
            waiting[node] = store
            if returned:
                self.promote_node(node)
            return None
        evicted = None
        if len(self) >= MAX_WAITING:
            evicted = next(iter(self._waiting[0] or self._waiting[1]))
            self.discard_node(evicted)
        store.since = self._clock()
        self._waiting[returned][node] = store
        self.waiting_tokens += store.num_tokens
        return evicted

    def promote_node(self, node: Node) -> None:
        """Put a node that was used again among those that go first. Ignores nodes that do not
        wait."""
        store = self._waiting[0].pop(node, None)
        if store is not None:
            self._waiting[1][node] = store

    def discard_node(self, node: Node) -> bool:
        """Drop a node from the queue; return whether it waited."""
        store = self._waiting[0].pop(node, None) or self._waiting[1].pop(node, None)
        if store is None:
            return False
        self.waiting_tokens -= store.num_tokens
        return True

    def clear(self) -> None:
        """Drop all nodes and flights: the tier was emptied."""
        for waiting in self._waiting:
            waiting.clear()
        self._flights.clear()
        self._num_flights_of.clear()
        self.waiting_tokens = self.flight_tokens = 0

    # ---- Whose turn it is ----

    def take_next_node(self, *, loads_wait: bool) -> NodeStore[Node] | None:
        """Take the node whose store shall begin now out of the queue; None when no store shall."""
        source = self._waiting[1] or self._waiting[0]
        if not source:
            return None
        store = next(iter(source.values()))
        if not self._may_begin(store.num_tokens, loads_wait=loads_wait):
            return None
        self.discard_node(store.node)
        return store

    def _may_begin(self, num_tokens: int, *, loads_wait: bool) -> bool:
        dirty = self.waiting_tokens + self.flight_tokens
        if loads_wait and dirty <= self._host_tokens * HIGH_SHARE:
            if self._flights:
                return False
            return dirty > self._host_tokens * LOW_SHARE or self._oldest_wait_s() >= MAX_HOLD_S
        if len(self._flights) < MIN_FLIGHTS:
            return True
        return self.flight_tokens + num_tokens <= self.limit_tokens

    def _oldest_wait_s(self) -> float:
        heads = (next(iter(waiting.values())) for waiting in self._waiting if waiting)
        return self._clock() - min(store.since for store in heads)

    # ---- What is in flight ----

    @property
    def has_flights(self) -> bool:
        return bool(self._flights)

    def note_flight(self, operation: int, store: NodeStore[Node]) -> None:
        """Note that a store was handed over."""
        self._flights[operation] = store
        self._num_flights_of[store.node] += 1
        self.flight_tokens += store.num_tokens

    def end_flight(self, operation: int) -> NodeStore[Node] | None:
        """Take out and return a store that has ended; None of one that is unknown."""
        store = self._flights.pop(operation, None)
        if store is not None:
            self.flight_tokens -= store.num_tokens
            self._num_flights_of[store.node] -= 1
            if not self._num_flights_of[store.node]:
                del self._num_flights_of[store.node]
        return store

    def adapt_limit(self, waited_s: float) -> None:
        """Adapt the limit after operations ended, the last of which had waited that long to
        begin."""
        if waited_s > TARGET_WAIT_S:
            now = self._clock()
            if now - self._shrunk_at >= TARGET_WAIT_S:
                self._shrunk_at = now
                self.limit_tokens = max(self._host_tokens * MIN_SHARE, self.limit_tokens / 2)
        elif not self._flights and self:
            self.limit_tokens = min(self._host_tokens * MAX_SHARE, self.limit_tokens * 2)
