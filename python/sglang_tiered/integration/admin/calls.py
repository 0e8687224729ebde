"""``Calls``: what the calls of the tiers have under way in a scheduler process, for ``service``.

A call begins at its first question, and each later one with its number polls it. Every rank gets
the same questions in the same order and answers for its own part of each page. Where ranks must go
on alike they exchange numbers. A call that fails on one rank, or goes another way there, fails on
all before the next exchange: they would wait for that rank. No question waits for a disk.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sglang_tiered.api import CallError
from sglang_tiered.integration.ranks import first_ranks, least_on_every_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.storage.backend import TieredStorage


NO_STORE = "this server has no tier that outlives it; start it with --tier-mode nvme"
DETACHED = "the NVMe tier is detached, and keeps what it holds; attach it and ask again"
NO_NAMESPACE = "the model's weights are still read, and until then no page is known; ask again"
DROPPED = "too many calls of this kind at once; ask again"
ELSEWHERE = "another rank of this server failed, as its log says; ask again"

_MAX_ENTRIES = 256
_MAX_LISTINGS = 32

Answer = dict[str, Any]
UNKNOWN: Answer = {"done": True, "unknown": True}


Steps = Generator[list[int] | bytes | Answer, Any, Any]
"""A call under way on this rank. It yields numbers, as many as on every other rank, and is sent the
least of all ranks; or bytes, and is sent those of the first rank; or how far it is, and goes on at
the next question unless that says ``done``. It may raise ``CallError``, or return its answer."""

Begin = Callable[["TieredRadixCache", str, dict[str, Any]], Steps]
"""Makes a call of the cache, its number and its body. Nothing happens before its first step."""

_FAILED, _REFUSED, _ENDED, _ANSWERED, _TOLD, _COUNTED = range(6)
"""What a step came to; ``_COUNTED`` and more where it tells numbers, by how many there are."""

_reporter = ThreadPoolExecutor(1, "tier-report")


class Calls:
    """The calls of one scheduler process, by their names and numbers. Scheduler thread only."""

    def __init__(self, begins: Mapping[str, Begin]) -> None:
        self._begins = begins
        self._entries: dict[str, OrderedDict[str, Steps | Answer | Exception]] = defaultdict(
            OrderedDict
        )

    def answer(
        self, cache: TieredRadixCache, name: str, number: str, body: dict[str, Any]
    ) -> Answer:
        """Begin a call, or answer how far it is. What has ended is answered again."""
        entries = self._entries[name]
        if number not in entries:
            if body.keys() <= {"id"}:  # a later question, and it was dropped
                entries[number] = {"error": DROPPED, "status": 503}
            else:
                entries[number] = self._begins[name](cache, number, body)
        entry = entries[number]
        if isinstance(entry, Generator):
            entry, is_final = advance(cache, entry)
            if is_final:
                entries[number] = entry
        if len(entries) > (_MAX_LISTINGS if name == "conversations" else _MAX_ENTRIES):
            ended = (each for each, what in entries.items() if not isinstance(what, Generator))
            del entries[next(ended, next(iter(entries)))]
        if isinstance(entry, Exception):  # on every rank
            raise entry
        assert isinstance(entry, dict)
        return entry


def advance(cache: TieredRadixCache, steps: Steps) -> tuple[Any, bool]:
    """Take a call to its next answer. Returns that, or what it failed with, on every rank; and
    whether it has ended."""
    told: Any = None
    while True:
        kind, step = _step(steps, told)
        least, most = least_on_every_rank(cache, [kind, -kind])
        if least == _FAILED or least != -most:  # the others would wait for an exchange with it
            return step if kind == _FAILED else RuntimeError(ELSEWHERE), True
        if kind == _TOLD:
            told = first_ranks(cache, step)
        elif kind >= _COUNTED:
            told = least_on_every_rank(cache, step) if step else []
        else:
            return step, kind != _ANSWERED


def _step(steps: Steps, told: Any) -> tuple[int, Any]:
    """Take one step. Returns what it came to, and what it tells."""
    try:
        step = steps.send(told)
    except StopIteration as end:
        return _ENDED, end.value
    except CallError as refusal:
        return _REFUSED, {"error": str(refusal), "status": refusal.status}
    except Exception as error:  # noqa: BLE001 - raised once every rank knows
        return _FAILED, error
    if isinstance(step, list):
        return _COUNTED + len(step), step
    if isinstance(step, bytes):
        return _TOLD, step
    return _ENDED if step["done"] else _ANSWERED, step


def on_thread(cache: TieredRadixCache, work: Callable[[], Any]) -> Steps:
    """Return what ``work`` comes to on a thread, once it has ended on every rank."""
    store_of(cache)
    begun = _reporter.submit(work)
    while (yield [int(has_ended(begun))]) == [0]:
        yield {"done": False}
        store_of(cache)
    return begun.result()


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
