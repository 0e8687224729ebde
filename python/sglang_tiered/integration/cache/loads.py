"""``RequestLoad``: what is known of a request and its load, from when it comes until it leaves.

``Loads`` holds the records of one scheduler, and ``Turns`` says whose load begins next. Those who
plan loads, begin them and wait for them read and write the record. Apart from it are locks, the
ranks' questions, and the stories that the request log tells. ``test/integration/load_states.py``
says which states follow each other.

A record goes when SGLang admits or aborts its request. So there are no more of them than requests
that SGLang holds, with their tokens, and no bound of ours. Scheduler thread only.
"""

from __future__ import annotations

import enum
import math
import time
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import chain, filterfalse
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase

from sglang_tiered.metrics import DurationCounts, Durations
from sglang_tiered.policy.cost_model import LoadPlan
from sglang_tiered.policy.shares import has_room_to_load

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.policy.queue_wait import QueuePlace


Request = TypeVar("Request")

MAX_TURNS = 16
"""Turns at once: a scheduler's step must not pay for a thousand."""

MAX_IGNORED_TURNS = 4
"""Turns in a row without a new attempt, after which others go first: its request does not wait for
admission, or may be attempted no more."""


class State(enum.IntEnum):
    """Says what a request waits for."""

    WAITING = enum.auto()  # for its turn
    ASKED = enum.auto()  # for the other ranks, to say where its load ends
    DEFERRED = enum.auto()  # for its load's turn
    LOADING = enum.auto()  # for a load that SGLang has
    BOTH_ENDS = enum.auto()  # for nothing: it may run while the back of its prefix loads


class PrefetchArguments(NamedTuple):
    """Holds the arguments of SGLang's ``prefetch_from_storage``."""

    request: CacheRequestHandle
    last_host_node_id: int
    new_input_tokens: list[int] | array[int]
    last_hash: str | None = None
    prefix_keys: list[str] | None = None
    matched_prefix_tokens: list[int] | range | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    storage_hit_end: int | None = None

    @property
    def new_key(self) -> RadixKey:
        """Return the key of the new tokens alone."""
        return RadixKey(self.new_input_tokens, self.extra_key, cache_salt=self.cache_salt)

    @property
    def num_before(self) -> int:
        """Return the tokens in memory, which the new ones follow."""
        return len(self.matched_prefix_tokens or ())


@dataclass(slots=True)
class PricedLoad:
    """Describes a load that is planned or under way. Times are of the planner's clock."""

    plan: LoadPlan
    is_back: bool = False  # read from its end, while its request computes the front
    queued_at: float | None = None
    begun_at: float | None = None  # when its reads were first seen under way
    left_to_begin_s: float = 0.0


@dataclass(slots=True)
class Segment:
    """A part of what loads from the back of a prompt. Positions are tokens of it."""

    handle: CacheRequestHandle
    start: int
    end: int
    parts: list[int]  # tokens by tier
    num_arrived: int = 0
    has_ended: bool = False

    def left(self, info: Any) -> list[int]:
        """Return the tokens by tier that have not arrived."""
        if self.has_ended:
            return [0] * len(self.parts)
        done = info.operation.completed_tokens if info is not None else 0
        share = 1 - done / (self.end - self.start)
        return [round(num_tokens * share) for num_tokens in self.parts]


@dataclass(slots=True)
class Back:
    """What loads for a request that computes its front. ``segments`` are not in the tree yet,
    ascending."""

    request: CacheRequestHandle
    segments: list[Segment]
    begun_at: float
    expected_s: float  # until all segments have arrived, as it was priced when they began
    end: int
    handles: list[CacheRequestHandle]  # of all segments that were ever begun
    req: Any = None
    reach: int | None = None  # how far the tree holds the prompt, while the request waits again


@dataclass(slots=True, eq=False)
class RequestLoad:
    """See the module docstring. Numbers are of tokens."""

    request: Any = None
    state: State = State.WAITING
    place: QueuePlace | None = None  # in the queue
    prefix: dict[str, Any] | None = None  # the arguments of its last plan
    least: LoadPlan = LoadPlan((), 0.0, 0.0)  # the better of loading and computing
    load: PricedLoad | None = None
    num_put_off: int | None = None  # to load in its turn, in the states ASKED and DEFERRED
    num_turns: int = 0  # since its last attempt
    back: Back | None = None  # of its prefix, in the state BOTH_ENDS
    # What is said of a waiting request when it leaves:
    num_held: int = 0  # in the tiers, when it came
    num_loaded: int = 0
    num_rest: int = 0  # that it is to compute
    rank: int = 0  # those of smaller ranks are admitted first
    may_yield: bool = False  # it may be computed in chunks of ours
    has_run: bool = False  # it comes again, with less than it had
    is_own_attempt: bool = False  # that SGLang was asked for here
    is_last_attempt: bool = False  # SGLang makes no more
    key: RadixKey | None = None  # while it loads, of all that is in memory once that has ended
    # Of what its load brought, as long as host copies of it are locked:
    num_landed: int = 0
    landed_at: int = 0  # in which step
    arrived_at: float | None = None
    held_up_at: float | None = None  # when nothing but its load first kept it


class Loads(Generic[Request]):
    """See the module docstring. Looks at the clock when a request arrives, when its load first
    keeps it, and when it is admitted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits, self._waits_for_loads = Durations(), Durations()
        self._progress_at = -math.inf  # of a request that had loaded
        self._records: dict[Request, RequestLoad] = {}
        self._in_state: dict[State, dict[Request, None]] = {state: {} for state in State}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RequestLoad]:
        return iter(self._records.values())

    def get(self, request: Request) -> RequestLoad:
        """Return the record of a request. Of one that has not come, or that has left, it is blank,
        and nobody remembers what is written in it."""
        return self._records.get(request) or RequestLoad(request)

    def of(self, request: Request) -> RequestLoad:
        """Return the record of a request, which comes if there is none."""
        record = self._records.get(request)
        if record is None:
            record = self._records[request] = RequestLoad(request)
            self._in_state[record.state][request] = None
        return record

    def in_state(self, *states: State) -> list[Request]:
        """Return the requests in these states, of each first those that came to it first."""
        return [request for state in states for request in self._in_state[state]]

    def num_in(self, state: State) -> int:
        """Return how many requests are in a state."""
        return len(self._in_state[state])

    def move(self, request: Request, state: State) -> None:
        """Put a request into a state, behind all that are in it. Unknown ones are ignored."""
        record = self._records.get(request)
        if record is not None:
            del self._in_state[record.state][request]
            record.state = state
            self._in_state[state][request] = None

    # ---- How long they wait ----

    def arrives(self, request: Request) -> None:
        """Note a request that arrived. One that waits already keeps its time."""
        record = self.of(request)
        if record.arrived_at is None:
            record.arrived_at = self._clock()

    def held_up(self, record: RequestLoad) -> None:
        """Note that a request's turn has come, and that it waits for its load."""
        if record.arrived_at is not None and record.held_up_at is None:
            record.held_up_at = self._clock()

    def held_s(self, record: RequestLoad) -> float:
        """Return how long nothing but its load has kept a request."""
        return 0.0 if record.held_up_at is None else self._clock() - record.held_up_at

    def stalled_s(self, record: RequestLoad) -> float:
        """Return how long nothing but its load has kept a request while none that had loaded made
        progress. Those leave room, which goes to the ones that wait in their order: a busy server
        that had them compute what they wait for would be slower for all. Others renew nothing, or
        a stream of them would keep a request for ever whose room is never left."""
        held_up_at = record.held_up_at
        return 0.0 if held_up_at is None else self._clock() - max(held_up_at, self._progress_at)

    def note_progress(self) -> None:
        """Note that a request that had loaded was admitted, or the prefill of some ended."""
        self._progress_at = self._clock()

    def admitted(self, record: RequestLoad) -> None:
        """Count the waits of a request."""
        if record.num_loaded:
            self.note_progress()
        if record.arrived_at is not None:
            self._waits.record(self._clock() - record.arrived_at)
            if record.num_loaded:
                self._waits_for_loads.record(self.held_s(record))

    def wait_stats(self) -> dict[str, DurationCounts]:
        """Return the waits of requests until their admission, and how long nothing but its load
        kept each of those with one."""
        return {"requests": self._waits.take(), "loads": self._waits_for_loads.take()}

    # ---- They leave ----

    def keep_back(self, request: Request) -> None:
        """Forget all of a request that was admitted but the load of its back."""
        record = self._records[request]
        self._records[request] = RequestLoad(
            request, record.state, load=record.load, back=record.back
        )

    def drop(self, request: Request) -> None:
        """Drop a request that has left. Unknown ones are ignored."""
        record = self._records.pop(request, None)
        if record is not None:
            del self._in_state[record.state][request]

    def clear(self) -> None:
        """Forget all loads. Of requests that wait, how long they do is kept: SGLang may empty the
        tree under them."""
        records, self._records = self._records, {}
        for requests in self._in_state.values():
            requests.clear()
        for request, record in records.items():
            if record.arrived_at is not None:
                fresh = self.of(request)
                fresh.arrived_at, fresh.held_up_at = record.arrived_at, record.held_up_at


class Turns:
    """The loads of one scheduler that were put off. Sizes are tokens.

    Loads land in the host tier before their requests use them. If more were begun than fit, each
    would evict an earlier one before its use. So at most ``limit`` tokens are loading, or loaded
    and not yet used.

    Room is given in one place, once a step (``take``), so the same room is promised once. Requests
    that could start but for their load come first, in their order. The others, whose admission is
    far, have what is left. The first without room keeps what there is, and nobody behind it begins.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ready: set[RequestLoad] = set()  # that could have started since the last turns
        self._order: list[RequestLoad] = []
        self._num_tokens = 0  # of those that take turns

    def has_room(self, num_tokens: int, num_taken: int) -> bool:
        """Return whether ``num_tokens`` may be loaded beside ``num_taken`` under way."""
        return has_room_to_load(self._limit, num_tokens, num_taken)

    def has_room_for_next(self, num_tokens: int, num_taken: int) -> bool:
        """The same for a request that has just come, and overtakes nobody who waits for room."""
        return num_tokens == 0 or (not self.wait_for_room and self.has_room(num_tokens, num_taken))

    @property
    def wait_for_room(self) -> bool:
        """Return whether a request that takes turns waits for room."""
        return self._num_tokens > 0

    def put_off(self, record: RequestLoad, num_tokens: int, *, rests: bool = False) -> None:
        """Put the load of so many tokens off until it is attempted again. Turns are in the order of
        admission. ``rests``: it takes no turn before its request could start."""
        record.num_put_off, record.num_turns = num_tokens, MAX_IGNORED_TURNS if rests else 0
        self._num_tokens += num_tokens * (not rests)
        insort(self._order, record, key=_order)

    def could_start(self, record: RequestLoad) -> None:
        """Note that a request waits for nothing but its load, until the next turns."""
        self._ready.add(record)
        if record.num_turns >= MAX_IGNORED_TURNS:  # it is attempted after all
            record.num_turns = 0
            self._num_tokens += record.num_put_off or 0

    def first_ready(self) -> RequestLoad | None:
        """Return the first of the requests that could start."""
        return min(self._ready, key=_order, default=None)

    def withdraw(self, record: RequestLoad) -> None:
        """Put a load off no more: it begins, or its request was aborted."""
        first = bisect_left(self._order, _order(record), key=_order)
        del self._order[self._order.index(record, first)]
        self._ready.discard(record)
        if record.num_turns < MAX_IGNORED_TURNS:
            self._num_tokens -= record.num_put_off or 0
        record.num_put_off = None

    def take(self, num_taken: int, *, only_ready: bool = False) -> list[Any]:
        """Return the requests whose loads find room now, one beside the other: first those that
        could start (``only_ready``: no others), each time in their order. Each counts as a turn,
        whatever comes of it."""
        found: list[Any] = []
        ready, self._ready = self._ready, set()
        others = () if only_ready else filterfalse(ready.__contains__, self._order)
        for record in chain(sorted(ready, key=_order), others):
            num_tokens = record.num_put_off or 0
            if record.num_turns >= MAX_IGNORED_TURNS:
                continue
            if len(found) >= MAX_TURNS or not self.has_room(num_tokens, num_taken):
                break
            num_taken += num_tokens
            record.num_turns += 1
            if record.num_turns == MAX_IGNORED_TURNS:
                self._num_tokens -= num_tokens
            found.append(record.request)
        return found

    def clear(self) -> None:
        self._ready.clear()
        self._order.clear()
        self._num_tokens = 0


def _order(record: RequestLoad) -> tuple[int, int]:
    assert record.place is not None, "it waits in the queue"
    return record.place.order


# ---- What the tiers hold of a load ----


def restorable_ends(
    cache: UnifiedRadixCache, node_id: int, hashes: list[str], storage: TieredStorage
) -> list[int] | None:
    """Return after how many tokens of these pages below a node a load may end; None if after any
    page. In a model with sliding windows or Mamba, states are stored at some places only."""
    num_tokens = len(hashes) * cache.page_size
    states: list[Any] = []
    for kind in cache.tree_components:
        if kind is BASE_COMPONENT_TYPE or not hashes:
            continue
        staging = cache.components[kind].prepare_prefetch(node_id, prefetch_tokens=num_tokens)
        if staging.staging_tokens:
            states += cache.tree_core.build_hicache_transfers(
                kind,
                node_id,
                CacheTransferPhase.PREFETCH,
                prefetch_tokens=num_tokens,
                staging_tokens=staging.staging_tokens,
            )
    if not states:
        return None
    # SGLang loads no state for less than a window, except of a whole prompt.
    is_root = cache.tree_core.is_root(node_id)
    shortest = 1 if is_root else max(len(state.keys) for state in states)
    ends = storage.batch_exists_v2(hashes, states).restorable_prefix_pages
    return [end * cache.page_size for end in ends or () if end >= shortest]


def allocate_now(cache: Any) -> None:
    """Have SGLang allocate host memory for loads that were answered on the spot, so that they begin
    now and not in the next step. On a lone rank, and not in the middle of a step."""
    num_answered = cache.cache_controller.prefetch_hit_queue.qsize()
    cache._drain_storage_control_queues_impl(num_answered, 0, 0, 0, None, False)  # noqa: SLF001
