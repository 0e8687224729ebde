"""``RecentRequests``: the prefixes that requests put into the tree lately."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from array import array

__all__ = ["RecentRequests", "Selector"]

_MAX_REQUESTS, _MAX_TOKENS = 1024, 1 << 22


class Selector(NamedTuple):
    """The tokens of a prefix, and whose they are."""

    tokens: array[int]
    extra_key: str | None
    cache_salt: str | None


class RecentRequests:
    """Keeps what requests put into the tree lately, by their id. Bounded; scheduler thread only."""

    def __init__(self) -> None:
        self._selectors: OrderedDict[str, Selector] = OrderedDict()
        self._num_tokens = 0

    def note_request(self, rid: str, selector: Selector) -> None:
        self._drop(rid)
        self._selectors[rid] = selector
        self._num_tokens += len(selector.tokens)
        while len(self._selectors) > _MAX_REQUESTS or self._num_tokens > _MAX_TOKENS:
            self._drop(next(iter(self._selectors)))

    def get(self, rid: str) -> Selector | None:
        return self._selectors.get(rid)

    def _drop(self, rid: str) -> None:
        dropped = self._selectors.pop(rid, None)
        if dropped is not None:
            self._num_tokens -= len(dropped.tokens)
