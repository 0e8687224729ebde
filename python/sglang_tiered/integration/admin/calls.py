"""``Calls``: what the calls of the tiers have under way in a scheduler process, for ``service``.

A call begins at its first question, and each later one with its number polls it. Every rank gets
the same questions in the same order and answers for its own part of each page. Ranks exchange a few
numbers, of which the least count. What fails on one rank is told too, before it is raised: the
others would wait for that rank in their exchange. No question waits for a disk.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_tiered.api import CallError
from sglang_tiered.integration.ranks import least_on_every_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.storage.backend import TieredStorage

__all__ = ["UNKNOWN", "Answer", "Calls", "Work", "has_ended", "is_detached", "outcome", "store_of"]

NO_STORE = "this server has no tier that outlives it; start it with --tier-mode nvme"
DETACHED = "the NVMe tier is detached; attach it and ask again"
DROPPED = "too many calls of this kind at once; ask again"
ELSEWHERE = "another rank of this server failed, as its log says; ask again"

_MAX_ENTRIES = 256
_MAX_LISTINGS = 32

Answer = dict[str, Any]
UNKNOWN: Answer = {"done": True, "unknown": True}


class Work(NamedTuple):
    """What a call has under way on this rank."""

    values: Callable[[], list[int]]
    """Returns this rank's numbers, as many as on every other. Exchanges nothing."""
    answer: Callable[[list[int]], Answer | Work]
    """Returns how far it is, by the least numbers of all ranks, or what goes on in its place."""


Entry = Work | Answer | Exception
Begin = Callable[["TieredRadixCache", str, dict[str, Any]], Answer | Work]
"""Begins a call: the cache, its number and its body. May raise ``CallError``, as all ``Work`` may,
on all ranks or on none."""


class Calls:
    """The calls of one scheduler process, by their names and numbers. Scheduler thread only."""

    def __init__(self, begins: Mapping[str, Begin]) -> None:
        self._begins = begins
        self._entries: dict[str, OrderedDict[str, Entry]] = defaultdict(OrderedDict)

    def answer(
        self, cache: TieredRadixCache, name: str, number: str, body: dict[str, Any]
    ) -> Answer:
        """Begin a call, or answer how far it is. What has ended is answered again."""
        entries = self._entries[name]
        if number not in entries:
            entries[number] = _tried(partial(self._begin, cache, name, number, body))
        entry = entries[number]
        values = _tried(entry.values) if isinstance(entry, Work) else []
        if not isinstance(values, list):
            entry = entries[number] = values
        (is_well,) = least_on_every_rank(cache, [int(not isinstance(entry, Exception))])
        if not is_well and not isinstance(entry, Exception):
            entry = entries[number] = RuntimeError(ELSEWHERE)
        if len(entries) > (_MAX_LISTINGS if name == "conversations" else _MAX_ENTRIES):
            ended = (each for each, what in entries.items() if not isinstance(what, Work))
            del entries[next(ended, next(iter(entries)))]
        if isinstance(entry, Exception):  # on every rank
            raise entry
        if isinstance(entry, dict):
            return entry
        assert isinstance(entry, Work)
        least = least_on_every_rank(cache, values) if values else values
        found: Entry = _tried(partial(entry.answer, least))
        if isinstance(found, dict) and not found.get("done", True):
            return found
        entries[number] = found
        if isinstance(found, Exception):  # of which the others hear at the next question
            raise found
        return found if isinstance(found, dict) else {"done": False}

    def _begin(
        self, cache: TieredRadixCache, name: str, number: str, body: dict[str, Any]
    ) -> Answer | Work:
        if body.keys() <= {"id"}:  # a later question, and it was dropped
            raise CallError(DROPPED, 503)
        return self._begins[name](cache, number, body)


def _tried(step: Callable[[], Any]) -> Any:
    """Return what a step returns, a refusal as the answer that it is, and a failure as itself."""
    try:
        return step()
    except CallError as refusal:
        return {"error": str(refusal), "status": refusal.status}
    except Exception as error:  # noqa: BLE001 - raised once every rank knows
        return error


def has_ended(future: Future[Any]) -> bool:
    """Return whether a future has a result. Raises what it failed with."""
    is_done = future.done()
    if is_done:
        future.result()
    return is_done


def outcome(futures: Sequence[Future[bool]]) -> list[int]:
    """Return whether all have ended, and whether all as true."""
    done = all(map(has_ended, futures))
    return [int(done), int(done and all(each.result() for each in futures))]


def store_of(cache: TieredRadixCache) -> TieredStorage:
    """Return what keeps pages. Raises ``CallError`` where none is attached: 503 if it could be."""
    if cache.storage is None:
        raise CallError(DETACHED, 503) if is_detached(cache) else CallError(NO_STORE)
    return cache.storage


def is_detached(cache: TieredRadixCache) -> bool:
    """Return whether an operator has detached this server's tiers."""
    return cache.storage is None and cache.config is not None and cache.config.nvme is not None
