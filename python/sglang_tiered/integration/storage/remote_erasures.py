"""``RemoteErasures``: what other servers erased, hidden in the tiers and queued for the scheduler.

It arrives on a thread of the peer tier or of the bucket, and counts as applied once that thread is
done with it: from then on others take pages of this server again. So that thread erases in the
tiers. Device and host memory belong to the scheduler: until it hides there what is named, the gate
stores none of it.

Requests must go by the same keys on all ranks, so all hide the same in the same step: what the
first rank has heard of, as bytes. What the others hear clears their tiers only. A prefix is found
only where every rank holds its part, and the first rank's part is missing while its gate is closed.
"""

from __future__ import annotations

import threading
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import msgspec

from sglang_tiered.storage.base import KEY_BYTES, Erasure

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.integration.storage.admission_gate import StoreGate

__all__ = ["MAX_WAITING", "RemoteErasures"]

MAX_WAITING = 4096
"""Tenants that wait one by one; beyond, memory hides all that it holds."""

MAX_WAITING_PAGES = 131_072
"""The same for pages: 150 bytes each."""

MAX_PACKED_PAGES = 4096
"""Pages that all ranks hide in one step: 150 kB to reduce over them."""

_QUESTION = "what other servers erased"


class _Agreement(Protocol):
    """The part of ``RankAgreement`` that is used here."""

    is_first: bool

    def ask_ranks(self, question: Hashable, value: int) -> int | None: ...

    def drop_question(self, question: Hashable) -> None: ...


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    tenants: list[bytes | None]  # None: all that there is
    keys: bytes


class RemoteErasures:
    """Takes erasures by ``__call__``, on any thread; ``step`` is on the scheduler's. ``erase`` is
    that of the tiers."""

    def __init__(self, gate: StoreGate, erase: Callable[[Erasure], Future[bool]]) -> None:
        self._gate = gate
        self._erase = erase
        self._lock = threading.Lock()
        self._tenants: dict[bytes | None, None] = {}
        self._pages: dict[str, None] = {}
        self._is_followed = True
        gate.heard = self._pages

    def __call__(self, what: Erasure) -> Future[bool]:
        """Erase what another server did. True once that is durable here."""
        with self._lock:
            if self._is_followed:
                if what.keys is None:
                    self._tenants[what.tenant] = None
                self._pages.update(dict.fromkeys(what.hashes))
                if len(self._tenants) > MAX_WAITING or len(self._pages) > MAX_WAITING_PAGES:
                    self._clear()
                    self._tenants[None] = None
                self._block()
        return self._erase(what)

    def step(
        self,
        agreement: _Agreement,
        first_ranks: Callable[[bytes], bytes],
        hide: Callable[[Sequence[Erasure]], object],
    ) -> None:
        """Hide in memory what the first rank has heard of; all ranks do so in the same step.
        ``first_ranks`` returns what was passed to it there."""
        if self._is_followed and not agreement.is_first:
            self.clear_tiers_only()
        waits = agreement.ask_ranks(_QUESTION, -int(bool(self._tenants or self._pages)))
        if waits is None:
            return
        agreement.drop_question(_QUESTION)
        if waits:
            erasures = _unpack(first_ranks(self._pack()))
            hide(erasures)
            self._applied(erasures)

    def _pack(self) -> bytes:
        with self._lock:
            keys = b"".join(map(bytes.fromhex, islice(self._pages, MAX_PACKED_PAGES)))
            return msgspec.msgpack.encode(_Packed(list(self._tenants), keys))

    def _applied(self, erasures: Sequence[Erasure]) -> None:
        """Allow stores again: this is out of reach in device and host memory, and nothing queued
        from there is stored."""
        for each in erasures:
            if each.keys is None:
                with self._gate.lock:
                    self._gate.drop_queued(each.tenant)
        with self._lock:
            for each in erasures:
                if each.keys is None:
                    self._tenants.pop(each.tenant, None)
                for page in each.hashes:
                    self._pages.pop(page, None)
            self._block()

    def clear_tiers_only(self) -> None:
        """Leave memory alone from now on: the first rank hears of the same, or there is none that
        could tell the stages of a pipeline of it."""
        with self._lock:
            self._is_followed = False
            self._clear()
            self._block()

    def _clear(self) -> None:
        self._tenants.clear()
        self._pages.clear()

    def _block(self) -> None:
        self._gate.blocked = frozenset(self._tenants)


def _unpack(data: bytes) -> list[Erasure]:
    packed = msgspec.msgpack.decode(data, type=_Packed)
    erasures = [Erasure(tenant=tenant, spread=False) for tenant in packed.tenants]
    starts = range(0, len(packed.keys), KEY_BYTES)
    if starts:
        keys = (packed.keys[at : at + KEY_BYTES] for at in starts)
        erasures.append(Erasure.of(keys, spread=False))
    return erasures
