"""``ChainLoader``: loads a prefix to host memory for which no request waits.

It comes the way of every request's load, through the same plan, the same window and SGLang's
verified prefetch. But it comes in pieces and one piece at a time: a request that comes finds at
most one of them ahead of it. What has arrived is an ordinary node of the tree, most recently used,
in host memory; nothing locks it. Device memory is no place to load to: SGLang's ``load_back``
commits device pages before they are filled, and only the batch that asked waits for them.

Scheduler thread only. Ranks come to the same decisions: they plan each piece in the same step and
load what the shortest plan says.
"""

from __future__ import annotations

import enum
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE

from sglang_tiered.integration.cache.declined_loads import ABSENT, told_end
from sglang_tiered.integration.cache.loads import (
    PrefetchArguments,
    allocate_now,
    restorable_ends,
)
from sglang_tiered.policy.hints import PIECE_TOKENS, piece_length

if TYPE_CHECKING:
    from array import array

    from sglang_tiered.integration.cache.hiding_cache import HidingCache
    from sglang_tiered.integration.cache.host_copies import HostCopies
    from sglang_tiered.integration.cache.load_planner import LoadPlanner
    from sglang_tiered.integration.cache.load_scheduler import LoadScheduler
    from sglang_tiered.integration.storage.backend import TieredStorage

__all__ = ["Chain", "ChainLoader", "PieceOutcome", "chain_of"]

ATTEMPT = -1
"""Of the handles of loads for which no request waits: those of requests count from 0."""

PIECES_IN_WINDOW = 4
"""A piece takes at most this part of what loads may fill."""


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


class PieceOutcome(enum.Enum):
    """Says what came of an attempt to load the next piece of a chain."""

    BEGUN = enum.auto()
    ASKED = enum.auto()  # the other ranks have the word, in the next step
    LATER = enum.auto()  # what comes before has no host copy yet, or too much is under way
    NOTHING = enum.auto()  # all is in memory, or the rest is nowhere or sooner computed
    NO_MEMORY = enum.auto()  # host memory is needed for others
    NOT_READ = enum.auto()  # the last piece was not there, or did not verify


class _ChainPiece(NamedTuple):
    handle: CacheRequestHandle
    operation: Any


def chain_of(
    cache: HidingCache, tokens: array[int], extra_key: str | None, cache_salt: str | None
) -> Chain:
    """Return the whole pages of a prompt."""
    hashes = cache.page_hashes(RadixKey(tokens, extra_key, cache_salt=cache_salt))
    return Chain(tokens, extra_key, cache_salt, hashes)


class ChainLoader:
    """See the module docstring. ``window_tokens``: what loads may fill."""

    def __init__(
        self,
        cache: HidingCache,
        loads: LoadScheduler,
        planner: LoadPlanner[CacheRequestHandle],
        copies: HostCopies,
        *,
        window_tokens: int,
    ) -> None:
        self._cache = cache
        self._loads = loads
        self._planner = planner
        self._copies = copies
        self._piece_tokens = min(PIECE_TOKENS, window_tokens // PIECES_IN_WINDOW)
        self._numbers = itertools.count()
        self._asked: CacheRequestHandle | None = None  # of which the ranks say how much to load
        self._piece: _ChainPiece | None = None
        self.num_in_memory = 0  # leading tokens of the chain, when it was looked at last

    @property
    def is_loading(self) -> bool:
        """Whether a piece is under way."""
        return self._piece is not None and self._cache.has_ongoing_prefetch(self._piece.handle)

    def has_room(self) -> bool:
        """Whether a piece may begin: no request's load is under way, or waits for room."""
        return self._loads.has_room_ahead(self._piece_tokens)

    def take_piece(self) -> tuple[int, PieceOutcome | None]:
        """Return how many tokens the piece that was under way brought, and why to stop, if so.
        Must not be called while one is under way."""
        piece, self._piece = self._piece, None
        if piece is None:
            return 0, None
        num_loaded, _ = self._cache.pop_prefetch_loaded_span(piece.handle)
        self._let_go(piece.handle)
        operation = piece.operation
        if operation.host_indices is None:
            found = operation.storage_hit_count >= self._cache.prefetch_threshold
            return 0, PieceOutcome.NO_MEMORY if found else PieceOutcome.NOT_READ
        return num_loaded, None if operation.completed_tokens else PieceOutcome.NOT_READ

    def begin(self, chain: Chain, end: int, storage: TieredStorage) -> PieceOutcome:
        """Begin to load what follows in memory of a chain's first ``end`` tokens. Ask again after
        ``ASKED`` and ``LATER``."""
        cache, page_size = self._cache, self._cache.page_size
        match = cache.match_prefix(MatchPrefixParams(key=chain.key_in(cache, end)))
        start = self.num_in_memory = int(match.device_prefix_len + match.host_hit_length)
        node: int = match.last_host_node
        if end - start < cache.prefetch_threshold:
            return self._ends(PieceOutcome.NOTHING)
        if not (cache.is_root(node) or cache.is_backuped(node)):
            return self._ends(PieceOutcome.LATER)
        if self._asked is None:
            self._asked = CacheRequestHandle(f"sglang-tiered-hint-{next(self._numbers)}", ATTEMPT)
        handle = self._asked
        first, last = start // page_size, end // page_size
        if all(kind is BASE_COMPONENT_TYPE for kind in cache.tree_components):
            last = min(last, first + max(1, self._piece_tokens // page_size))
        hashes = chain.hashes[first:last]  # further ones only to see where a load may end
        spans = storage.lookup_spans(hashes)
        num_planned = self._plan(handle, node, start, hashes, spans, storage)
        is_load = num_planned >= cache.prefetch_threshold
        own = told_end(start + num_planned) if is_load else ABSENT
        told = self._loads.agreement.ask_ranks(handle, own)
        if told is None:
            return PieceOutcome.ASKED
        if told < 0:
            return self._ends(PieceOutcome.NOTHING)
        num_tokens = min(told // 2, end) - start
        if num_tokens < cache.prefetch_threshold:  # meanwhile a request loaded it
            return self._ends(PieceOutcome.LATER)
        if not self._copies.make_host_path(node):
            return self._ends(PieceOutcome.NO_MEMORY)
        self._ends(PieceOutcome.BEGUN)
        hashes = hashes[: num_tokens // page_size]
        until = start + num_tokens + int(cache.tree_core.is_eagle)
        cache.begin_load(
            PrefetchArguments(
                handle,
                node,
                chain.tokens[start:until],
                chain.hashes[start // page_size - 1] if start else None,
                matched_prefix_tokens=range(start),  # SGLang takes its length alone
                extra_key=chain.extra_key,
                cache_salt=chain.cache_salt,
            ),
            hashes,
        )
        info = cache.ongoing_prefetch.get(handle)
        if info is None:  # too much is under way for SGLang
            self._let_go(handle)
            return PieceOutcome.LATER
        self._planner.begins_ahead(handle, num_tokens, num_before=start, spans=spans)
        self._piece = _ChainPiece(handle, info.operation)
        if cache.decides_alone:
            allocate_now(cache)
        return PieceOutcome.BEGUN

    def _plan(
        self,
        handle: CacheRequestHandle,
        node: int,
        start: int,
        hashes: list[str],
        spans: list[Any],
        storage: TieredStorage,
    ) -> int:
        """Return how many tokens this rank would load behind the first ``start``."""
        page_size = self._cache.page_size
        held = hashes[: sum(span.num_pages for span in spans)]
        places = restorable_ends(self._cache, node, held, storage)
        ends = None if places is None else [place * page_size for place in places]
        num_held = piece_length(
            len(held) * page_size,
            page_tokens=page_size,
            piece_tokens=self._piece_tokens,
            ends=ends,
        )
        return self._planner.plan_ahead(
            num_held,
            num_before=start,
            spans=spans,
            ends=ends,
            least=self._cache.prefetch_threshold,
        )

    def stop(self) -> None:
        """Give up the piece under way, and what is planned of the next."""
        piece, self._piece = self._piece, None
        if piece is not None:
            self._cache.release_aborted_request(piece.handle)
            self._let_go(piece.handle)
        self._ends(PieceOutcome.NOTHING)

    def clear(self) -> None:
        """Drop the load under way: the tree was emptied."""
        if self._piece is not None:
            self._let_go(self._piece.handle)
        self._piece = self._asked = None

    def _ends(self, outcome: PieceOutcome) -> PieceOutcome:
        """Ask the ranks no more about the piece that is planned."""
        if self._asked is not None:
            self._loads.agreement.drop_question(self._asked)
            self._asked = None
        return outcome

    def _let_go(self, handle: CacheRequestHandle) -> None:
        """Have everybody drop a load for which no request waited."""
        self._planner.drop(handle)
        self._cache.discard_storage_prefetch_accounting(handle)
        self._cache.storage_prefetch_retries.cancel(handle.rid)
