"""``RemoteErasures``: what other servers erased, hidden in the tiers and queued for the scheduler.

It arrives on a thread of the peer tier or of the bucket, and counts as applied once that thread is
done with it. From then on others take pages of this server again. So that thread erases in the
tiers. Device and host memory belong to the scheduler: until it hides there what is named, the gate
stores none of it.

Requests must go by the same keys on all ranks, so all hide the same in the same step: what the
first rank has heard of, as bytes. Another rank stores nothing of what it hears until then, unless
that has been hidden already. Should the first rank never hear of it, as it did so before a restart,
the other stores again after a while.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.storage.base import KEY_BYTES, Erasure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.integration.ranks import RankAgreement
    from sglang_tiered.integration.storage.admission_gate import StoreGate


MAX_WAITING = 4096
"""Erasures that wait one by one; beyond, memory hides all that it holds."""

MAX_WAITING_PAGES = 131_072
"""The same for pages: 150 bytes each."""

MAX_PACKED_PAGES = 4096
"""Pages that all ranks hide in one step: 150 kB to send to them."""

MAX_BLOCKED_S = 30.0
"""A rank above the first stores again what the first one has not told to hide by then."""

_MAX_HIDDEN = 4 * MAX_WAITING
_QUESTION = "what other servers erased"


_Packed = tuple[bytes, bytes | None, bytes | None]
"""Id, tenant and keys; with neither of these all that there is."""


class RemoteErasures:
    """Takes erasures by ``__call__``, on any thread; ``step`` is on the scheduler's. ``erase`` is
    that of the tiers."""

    def __init__(
        self,
        gate: StoreGate,
        erase: Callable[[Erasure], Future[bool]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._erase = erase
        self._clock = clock
        self._lock = threading.Lock()
        # By id, and when each was heard of; ``_hidden`` has the ids of the last ones.
        self._waiting: dict[bytes, tuple[Erasure, float]] = {}
        self._hidden: dict[bytes, None] = {}
        self._pages: Counter[str] = Counter()  # that wait, and for how many
        gate.heard = self._pages

    def __call__(self, what: Erasure) -> Future[bool]:
        """Erase what another server did. True once that is durable here."""
        with self._lock:
            for piece in what.pieces:
                self._wait(piece)
            if len(self._waiting) > MAX_WAITING or len(self._pages) > MAX_WAITING_PAGES:
                self._waiting.clear()
                self._pages.clear()
                self._wait(Erasure(spread=False))
            self._block()
        return self._erase(what)

    def _wait(self, what: Erasure) -> None:
        if what.id not in self._hidden and what.id not in self._waiting:
            self._waiting[what.id] = what, self._clock()
            self._pages.update(what.hashes)

    def ask(self, agreement: RankAgreement) -> None:
        """Have the ranks tell, in the exchange of the step that begins, whether the first one has
        heard of something; ``step`` comes behind the exchange."""
        agreement.drop_question(_QUESTION)  # of what was known at the end of a step
        agreement.ask_ranks(_QUESTION, -int(bool(self._waiting) and agreement.is_first))

    def step(
        self,
        agreement: RankAgreement,
        first_ranks: Callable[[bytes], bytes],
        hide: Callable[[Sequence[Erasure]], object],
    ) -> None:
        """Hide in memory what the first rank has heard of; all ranks do so in the same step.
        ``first_ranks`` returns what was passed to it there."""
        if self._waiting and not agreement.is_first:
            self._give_up()
        waits = agreement.ask_ranks(_QUESTION, -int(bool(self._waiting) and agreement.is_first))
        if waits is None:
            return
        agreement.drop_question(_QUESTION)
        if waits:
            erasures = _unpack(first_ranks(self._pack()))
            tenants = [each for each in erasures if each.keys is None]
            keys = [key for each in erasures for key in each.keys or ()]
            hide(tenants + ([Erasure.of(keys, spread=False)] if keys else []))
            self._applied(erasures)

    def _pack(self) -> bytes:
        with self._lock:
            packed: list[_Packed] = []
            num_pages = 0
            for what, _ in self._waiting.values():
                num_pages += len(what.keys or ())
                if num_pages > MAX_PACKED_PAGES:
                    break
                keys = None if what.keys is None else b"".join(what.keys)
                packed.append((what.id, what.tenant, keys))
            return msgspec.msgpack.encode(packed)

    def _applied(self, erasures: Sequence[Erasure]) -> None:
        """Allow stores again: this is out of reach in device and host memory, and nothing queued
        from there is stored."""
        for each in erasures:
            if each.keys is None:
                with self._gate.lock:
                    self._gate.drop_queued(each.tenant)
        with self._lock:
            self._hidden.update(dict.fromkeys(each.id for each in erasures))
            while len(self._hidden) > _MAX_HIDDEN:
                del self._hidden[next(iter(self._hidden))]
            self._remove(each.id for each in erasures)

    def _give_up(self) -> None:
        with self._lock:
            last = self._clock() - MAX_BLOCKED_S
            self._remove([name for name, (_, heard) in self._waiting.items() if heard <= last])

    def _remove(self, names: Iterable[bytes]) -> None:
        for name in names:
            if (waiting := self._waiting.pop(name, None)) is not None:
                for page in waiting[0].hashes:
                    self._pages[page] -= 1
                    if not self._pages[page]:
                        del self._pages[page]
        self._block()

    def _block(self) -> None:
        self._gate.blocked = frozenset(
            what.tenant for what, _ in self._waiting.values() if what.keys is None
        )


def _unpack(data: bytes) -> list[Erasure]:
    return [
        Erasure(None if keys is None else _split(keys), tenant, name, spread=False)
        for name, tenant, keys in msgspec.msgpack.decode(data, type=list[_Packed])
    ]


def _split(keys: bytes) -> tuple[bytes, ...]:
    return tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
