"""``Hints``: conversations that are about to be used come up to host memory (``/tier/prefetch``),
by loads for which no request waits.

A hint is served by the same policy as loads, one hint and one piece at a time. It is served only
while no request's load is under way or waits for room. It is dropped, and says so, when host memory
is needed. Either a request's load waits for the room of its piece, or kept pages had to give way.
Or the piece got no pages, or what it had loaded is gone again. At the end of its life it is
dropped, too, on however busy a server.

The tokens in host memory that all hints loaded and nobody has used yet have a limit. They take the
place of what was used least recently, and nobody has paid for them with a request. A hint's share
is free again once its conversation is used, or at the end of its life. A hint that is dropped
before it was loaded says why for one more life, to whoever asks again.

Scheduler thread only. Hints come to every rank in the same step. Whether one is over, which is a
matter of clocks, ranks ask each other, as they do how much to load. They plan each piece in the
same step and load what the shortest plan says.
"""

from __future__ import annotations

import enum
import itertools
import time
from array import array
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE

from sglang_tiered.integration.cache.load_scheduler import ABSENT, told_end
from sglang_tiered.integration.cache.loads import PrefetchArguments, allocate_now, restorable_ends

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang_tiered.integration.cache.hiding_cache import HidingCache
    from sglang_tiered.integration.cache.load_scheduler import LoadScheduler
    from sglang_tiered.integration.cache.spiller import Spiller
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.storage.base import Erasure, Span


ATTEMPT = -1
"""Of the handles of loads for which no request waits: those of requests count from 0."""

PIECE_TOKENS = 2048

PIECES_IN_WINDOW = 4
"""A piece takes at most this part of what loads may fill."""

LIFE_S = 60.0
"""A user who is about to come back has come back by then."""

MAX_HINTS = 256
"""Hints that are served, were served or dropped, and whose life has not ended."""

PAUSE_STEPS = 8
"""Steps between two looks at a chain that cannot be loaded yet: each matches it in the tree."""

NO_MEMORY = "host memory was needed for other requests; ask again when the server is less busy"
NOT_READ = "a tier did not give what it should hold, or it did not verify; the rest is computed"
OVER = f"the hint was not served within {LIFE_S:.0f} s, as loads of requests go first; ask again"
EMPTIED = "memory was to be emptied meanwhile; ask again"
DETACHED = "the tiers were detached meanwhile; attach them and ask again"
FORGOTTEN = "the conversation was forgotten meanwhile"
PURGED = "the pages of its tenant were purged meanwhile"
WEIGHTS = "the weights of the model were replaced meanwhile, so nothing fits them any more"


class Chain(NamedTuple):
    """A prefix of whole pages. Two of them are the same if their last pages are."""

    tokens: array[int]
    extra_key: str | None
    cache_salt: str | None
    hashes: list[str]

    def key_in(self, cache: HidingCache, end: int) -> RadixKey:
        """Return the key of the first ``end`` tokens; pages of pairs take one token more."""
        tokens = self.tokens[: end + int(cache.tree_core.is_eagle)]
        return RadixKey(tokens, self.extra_key, cache_salt=self.cache_salt)


def chain_of(
    cache: HidingCache, tokens: array[int], extra_key: str | None, cache_salt: str | None
) -> Chain:
    """Return the whole pages of a prompt."""
    hashes = cache.page_hashes(RadixKey(tokens, extra_key, cache_salt=cache_salt))
    return Chain(tokens, extra_key, cache_salt, hashes)


class HintEnd(enum.Enum):
    """Says how a hint ended."""

    LOADED = "loaded"  # all that pays is in host memory
    WITHDRAWN = "withdrawn"  # memory was needed, a read failed, or its pages are no more
    EXPIRED = "expired"


def piece_length(
    num_held: int, *, page_tokens: int, piece_tokens: int, ends: Sequence[int] | None = None
) -> int:
    """Return how much of ``num_held`` tokens to load at once: whole pages, and more than a piece
    only where a load may end (``ends``, ascending) at no place before. 0: nothing can be loaded."""
    size = max(page_tokens, piece_tokens // page_tokens * page_tokens)
    if ends is None:
        return min(num_held, size)
    return ends[min(bisect_left(ends, size), len(ends) - 1)] if ends else 0


@dataclass(slots=True, eq=False)
class Hint:
    """One conversation that is, or was, on its way to host memory. ``num_in_memory`` and ``end``:
    its leading tokens in memory when it was looked at last, and once nothing is left to load."""

    chain: Chain
    num_in_memory: int = 0
    end: int = 0
    name: str = ""  # the hash of its last page
    num_pages: int = 0
    number: int = 0
    num_tokens: int = 0  # of the bound: what is to be loaded, or was and has not been used
    until: float = 0.0  # when its life ends, by the clock of this rank
    is_active: bool = False
    num_passed: int = 0  # how often others went before it, since it could not be loaded
    why_dropped: str = ""  # empty while it is served, and once all that pays was loaded
    num_loaded: int = 0
    pause_steps: int = 0
    last_pages: set[str] = field(default_factory=set)  # whose use is that of what was loaded
    is_used: bool = False

    def __post_init__(self) -> None:
        self.name = self.chain.hashes[-1] if self.chain.hashes else ""
        self.num_pages = len(self.chain.hashes)

    def release(self) -> None:
        """Keep the name of the chain alone: what has ended may be long and many."""
        self.chain = self.chain._replace(tokens=array("q"), hashes=self.chain.hashes[-1:])

    @property
    def num_loading(self) -> int:
        """Return the tokens that are still to come."""
        return max(0, self.end - self.num_in_memory) if self.is_active else 0


class HintQueue:
    """The hints of one scheduler, at most ``capacity`` tokens of them, the same on every rank that
    is told the same. They are served in the order in which they came."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._hints: OrderedDict[str, Hint] = OrderedDict()  # as their lives end
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._hints)

    def __iter__(self) -> Iterator[Hint]:
        """Those whose life has not ended, as it does; they may be removed meanwhile."""
        return iter(list(self._hints.values()))

    def get(self, name: str) -> Hint | None:
        """Return the hint of a chain whose life has not ended, or what became of it."""
        return self._hints.get(name)

    def room_for(self, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` a hint may load now: all of them, or as many as all
        hints together may have; 0 if it must wait for others."""
        wanted = min(num_tokens, self.capacity)
        has_room = len(self._hints) < MAX_HINTS and self.num_tokens + wanted <= self.capacity
        return wanted if has_room else 0

    def add(self, hint: Hint, num_tokens: int, now: float) -> None:
        """Begin a hint in place of an earlier one of that chain. The caller has asked
        ``room_for``."""
        self.remove(hint.name)
        hint.num_tokens, hint.is_active = num_tokens, True
        self._keep(hint, now)

    def _keep(self, hint: Hint, now: float) -> None:
        hint.until = now + LIFE_S
        self._hints[hint.name] = hint
        self.num_tokens += hint.num_tokens

    def next(self) -> Hint | None:
        """Return the hint that is served now: of those that are active the one that was passed the
        fewest times, and of equal ones the first."""
        active = (hint for hint in self._hints.values() if hint.is_active)
        return min(active, key=lambda hint: hint.num_passed, default=None)

    def served(self, hint: Hint, num_tokens: int) -> None:
        """Note that nothing is left to load for a hint, which brought so many tokens."""
        num_tokens = min(num_tokens, hint.num_tokens)
        self.num_tokens += num_tokens - hint.num_tokens
        hint.is_active, hint.num_tokens = False, num_tokens

    def drop(self, hint: Hint, why: str, now: float) -> None:
        """Serve a hint no longer. What it loaded so far is as anybody's from now on."""
        self.remove(hint.name)
        hint.is_active, hint.why_dropped, hint.num_tokens = False, why, 0
        self._keep(hint, now)

    def oldest(self) -> Hint | None:
        """Return the hint whose life ends next."""
        return next(iter(self._hints.values()), None)

    def remove(self, name: str) -> None:
        """Drop a hint: it was used, or its life has ended. Unknown ones are ignored."""
        hint = self._hints.pop(name, None)
        if hint is not None:
            self.num_tokens -= hint.num_tokens


class Hints:
    """The hints of one scheduler: at most ``capacity`` tokens that nobody has used yet.
    ``window_tokens``: what loads may fill.

    What they load comes the way of every request's load, through the same plan, the same window and
    SGLang's verified prefetch. But it comes in pieces and one piece at a time: a request that comes
    finds at most one of them ahead of it. What has arrived is an ordinary node of the tree, most
    recently used, in host memory; nothing locks it. Device memory is no place to load to: SGLang's
    ``load_back`` commits device pages before they are filled, and only the batch that asked waits
    for them."""

    def __init__(
        self,
        cache: HidingCache,
        loads: LoadScheduler,
        stores: Spiller,
        capacity: int,
        *,
        window_tokens: int,
    ) -> None:
        self._cache = cache
        self._loads = loads
        self._stores = stores
        self._clock = time.monotonic
        self._queue = HintQueue(capacity)
        self._piece_tokens = min(PIECE_TOKENS, window_tokens // PIECES_IN_WINDOW)
        self._numbers = itertools.count()
        self._served: Hint | None = None
        # Of that one: of which piece the ranks say how much to load, and the piece under way.
        self._asked: CacheRequestHandle | None = None
        self._piece: Any = None  # SGLang's operation
        self._memory_is_short = False
        self.num_begun = self.num_tokens_loaded = 0
        self.ended = dict.fromkeys(HintEnd, 0)

    # ---- A hint comes ----

    def get(self, chain: Chain) -> Hint | None:
        """Return what became of a hint for this chain whose life has not ended."""
        return self._queue.get(chain.hashes[-1])

    def told(self, hint: Hint) -> None:
        """Drop why a hint was dropped: its asker knows, and may ask again."""
        if hint.why_dropped and self._queue.get(hint.name) is hint:
            self._end_life(hint)

    def begin(self, chain: Chain, num_in_memory: int, end: int) -> Hint | None:
        """Begin to load what follows in memory of a chain's first ``end`` tokens, or as many as
        hints may load. Returns None where hints before it take the room. Every rank makes this call
        in the same step, with the same arguments."""
        if (earlier := self.get(chain)) is not None:
            self._end_life(earlier)
        room = self._queue.room_for(end - num_in_memory)
        room = room // self._cache.page_size * self._cache.page_size
        if room < self._cache.prefetch_threshold:
            return None
        self.num_begun += 1
        hint = Hint(chain, num_in_memory, num_in_memory + room, number=self.num_begun)
        hint.last_pages = {hint.name, chain.hashes[hint.end // self._cache.page_size - 1]}
        self._queue.add(hint, room, self._clock())
        return hint

    def why_no_room(self) -> str:
        """Say why a hint does not begin now."""
        return (
            f"{len(self._queue)} hints for {self._queue.num_tokens} tokens are under way or not "
            f"used yet, of at most {self._queue.capacity} tokens; ask again"
        )

    # ---- It is served ----

    def step(self, storage: TieredStorage) -> None:
        """Begin or end a piece, once per scheduling step; costs next to nothing without hints."""
        if not len(self._queue):
            return
        self._end_oldest()
        # A request waits for the room that the piece under way takes.
        in_the_way = self._is_loading and self._loads.waits_for_room()
        if (self._memory_is_short or in_the_way) and self._served is not None:
            self._drop(self._served, NO_MEMORY)
        self._memory_is_short = False
        if self._is_loading:
            return
        self._take_piece()
        hint = self._queue.next()
        if hint is None or not self._loads.has_room_ahead(self._piece_tokens):
            return
        if hint.pause_steps > 0:
            hint.pause_steps -= 1
            return
        if hint is not self._served:
            self._ask_no_more()
        self._served = hint
        self._look(hint, storage)

    @property
    def _is_loading(self) -> bool:
        return self._piece is not None and self._cache.has_ongoing_prefetch(self._piece.handle)

    def _take_piece(self) -> None:
        """Note what a piece brought that has ended."""
        piece, self._piece = self._piece, None
        hint = self._served
        if piece is None or hint is None:
            return
        num_loaded, _ = self._cache.pop_prefetch_loaded_span(piece.handle)
        self._cache.release_aborted_request(piece.handle)
        hint.num_loaded += num_loaded
        hint.num_in_memory += num_loaded
        self.num_tokens_loaded += num_loaded
        was_found = piece.storage_hit_count >= self._cache.prefetch_threshold
        if piece.host_indices is None and was_found:
            self._drop(hint, NO_MEMORY)
        elif not piece.completed_tokens:
            self._drop(hint, NOT_READ)

    def _look(self, hint: Hint, storage: TieredStorage) -> None:
        """Look at what memory has of a chain, and begin to load what follows."""
        cache, was_in_memory = self._cache, hint.num_in_memory
        key = hint.chain.key_in(cache, hint.end)
        match = cache.match_prefix(MatchPrefixParams(key=key))
        node: int = match.last_host_node
        hint.num_in_memory = int(match.device_prefix_len + match.host_hit_length)
        if hint.num_in_memory < was_in_memory and hint.num_loaded > 0:
            self._drop(hint, NO_MEMORY)  # what was loaded is evicted already
        elif hint.end - hint.num_in_memory < cache.prefetch_threshold:
            self._all_is_loaded(hint)
        elif cache.is_root(node) or cache.is_backuped(node):
            self._plan_piece(hint, node, storage)
        else:
            self._postpone(hint)

    def _plan_piece(self, hint: Hint, node: int, storage: TieredStorage) -> None:
        """Begin to load what follows a node of a chain, as much as the shortest plan of all ranks
        says, or ask them."""
        cache, chain, start = self._cache, hint.chain, hint.num_in_memory
        if self._asked is None:
            self._asked = CacheRequestHandle(f"sglang-tiered-hint-{next(self._numbers)}", ATTEMPT)
        first, last = start // cache.page_size, hint.end // cache.page_size
        if all(kind is BASE_COMPONENT_TYPE for kind in cache.tree_components):
            last = min(last, first + max(1, self._piece_tokens // cache.page_size))
        hashes = chain.hashes[first:last]  # further ones only to see where a load may end
        spans = storage.lookup_spans(hashes)
        num_planned = self._num_planned(node, start, hashes, spans, storage)
        is_load = num_planned >= cache.prefetch_threshold
        own = told_end(start + num_planned) if is_load else ABSENT
        told = self._loads.agreement.ask_ranks(self._asked, own)
        if told is None:
            return
        num_tokens = min(told // 2, hint.end) - start
        if told < 0:
            self._all_is_loaded(hint)
        elif num_tokens < cache.prefetch_threshold:  # meanwhile a request loaded it
            self._postpone(hint)
        elif not self._stores.make_host_path(node):
            self._drop(hint, NO_MEMORY)
        else:
            self._begin_piece(hint, node, hashes[: num_tokens // cache.page_size], spans)

    def _num_planned(
        self, node: int, start: int, hashes: list[str], spans: list[Span], storage: TieredStorage
    ) -> int:
        """Return how many tokens this rank would load behind the first ``start``."""
        page_size = self._cache.page_size
        held = hashes[: sum(span.num_pages for span in spans)]
        ends = restorable_ends(self._cache, node, held, storage)
        num_held = piece_length(
            len(held) * page_size,
            page_tokens=page_size,
            piece_tokens=self._piece_tokens,
            ends=ends,
        )
        return self._loads.planner.plan_ahead(
            num_held,
            num_before=start,
            spans=spans,
            ends=ends,
            least=self._cache.prefetch_threshold,
        )

    def _begin_piece(self, hint: Hint, node: int, hashes: list[str], spans: list[Span]) -> None:
        cache, chain, start = self._cache, hint.chain, hint.num_in_memory
        handle, num_tokens = self._asked, len(hashes) * cache.page_size
        assert handle is not None
        self._ask_no_more()
        until = start + num_tokens + int(cache.tree_core.is_eagle)
        cache.begin_load(
            PrefetchArguments(
                handle,
                node,
                chain.tokens[start:until],
                chain.hashes[start // cache.page_size - 1] if start else None,
                matched_prefix_tokens=range(start),  # SGLang takes its length alone
                extra_key=chain.extra_key,
                cache_salt=chain.cache_salt,
            ),
            hashes,
        )
        info = cache.ongoing_prefetch.get(handle)
        if info is None:  # too much is under way for SGLang
            cache.release_aborted_request(handle)
            self._postpone(hint)
            return
        self._loads.planner.begins_ahead(handle, num_tokens, num_before=start, spans=spans)
        self._piece = info.operation
        if cache.decides_alone:
            allocate_now(cache)

    def _all_is_loaded(self, hint: Hint) -> None:
        """Note that all is in memory, or that the rest is nowhere or sooner computed."""
        self._stop()
        self._queue.served(hint, 0 if hint.is_used else hint.num_loaded)
        num_pages = hint.num_in_memory // self._cache.page_size
        hint.last_pages.update(hint.chain.hashes[:num_pages][-1:])
        self.ended[HintEnd.LOADED] += 1
        hint.release()

    def _postpone(self, hint: Hint) -> None:
        """Look again later, and at others meanwhile: what comes before has no host copy yet, or too
        much is under way."""
        self._stop()
        hint.pause_steps = PAUSE_STEPS
        hint.num_passed += 1

    def _stop(self) -> None:
        """Serve nobody: give up the piece under way, and what is planned of the next."""
        piece, self._piece = self._piece, None
        if piece is not None:
            self._cache.release_aborted_request(piece.handle)
        self._ask_no_more()
        self._served = None

    def _ask_no_more(self) -> None:
        if self._asked is not None:
            self._loads.agreement.drop_question(self._asked)
            self._asked = None

    def _end_oldest(self) -> None:
        """End the hint whose life ends next, once it has ended on any rank."""
        oldest = self._queue.oldest()
        if oldest is None:
            return
        agreement, question = self._loads.agreement, _is_alive(oldest)
        answer = agreement.ask_ranks(question, int(self._clock() < oldest.until))
        if answer is not None:
            agreement.drop_question(question)
        if answer != 0:
            return
        if oldest.is_active:
            self._drop(oldest, OVER, HintEnd.EXPIRED)
        else:
            self._end_life(oldest)

    # ---- It ends ----

    def note_memory_is_short(self) -> None:
        """Withdraw the hint that is served, in the next step: what is kept in host memory has to
        give way."""
        self._memory_is_short = self._served is not None

    def note_use(self, hashes: list[str]) -> None:
        """Note that a request uses the nodes that end in these pages: hints for them have come
        true."""
        for hint in self._queue:
            if hint.why_dropped or hint.last_pages.isdisjoint(hashes):
                continue
            hint.is_used = True
            if not hint.is_active:
                self._end_life(hint)

    def end_all(self, why: str) -> None:
        """Drop all hints. Every rank makes this call in the same step."""
        for hint in self._queue:
            self._end(hint, why)

    def erase(self, what: Erasure) -> None:
        """Drop the hints for what is erased. As ``end_all``."""
        gone, tenant_of = frozenset(what.hashes), self._cache.hidden_tenants.tenant_of
        for hint in self._queue:
            chain = hint.chain
            if what.keys is not None:
                if not gone.isdisjoint(chain.hashes):
                    self._end(hint, FORGOTTEN)
            elif what.tenant in (None, tenant_of(chain.extra_key, chain.cache_salt)):
                self._end(hint, PURGED)

    def _end(self, hint: Hint, why: str) -> None:
        if hint.is_active:
            self._drop(hint, why)
        elif not hint.why_dropped:
            self._end_life(hint)

    def tree_was_reset(self) -> None:
        """Drop all hints; SGLang has forgotten the load under way."""
        self.end_all(EMPTIED)
        self._memory_is_short = False

    def _drop(self, hint: Hint, why: str, how: HintEnd = HintEnd.WITHDRAWN) -> None:
        """Serve a hint no longer."""
        self._let_go(hint)
        self._queue.drop(hint, why, self._clock())
        self.ended[how] += 1
        hint.release()

    def _end_life(self, hint: Hint) -> None:
        self._let_go(hint)
        self._queue.remove(hint.name)

    def _let_go(self, hint: Hint) -> None:
        self._loads.agreement.drop_question(_is_alive(hint))
        if self._served is hint:
            self._stop()


def _is_alive(hint: Hint) -> tuple[str, int]:
    """Name the question that ranks ask about the end of a hint's life."""
    return "hint lives", hint.number
