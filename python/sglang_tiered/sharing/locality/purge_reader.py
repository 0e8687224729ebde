"""Applies the purges of other servers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_tiered.sharing.locality.formats import (
    MAX_KEYS_BYTES,
    unpack_forget,
    unpack_keys,
    unpack_purge,
)
from sglang_tiered.sharing.locality.purges import MAX_PURGES
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.base import Erasure, unique_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from sglang_tiered.sharing.locality.connection import IndexConnection
    from sglang_tiered.sharing.locality.formats import Forget
    from sglang_tiered.sharing.locality.redis_keys import RedisKeys
    from sglang_tiered.sharing.locality.state import IndexState

    EraseWanted = Callable[[Erasure], Future[bool]]

__all__ = ["PurgeReader"]

_FORGETS_AT_ONCE = 64

logger = logging.getLogger(__name__)


class PurgeReader:
    """Used by the reader's thread only."""

    def __init__(
        self,
        state: IndexState,
        connection: IndexConnection,
        erase_wanted: EraseWanted,
    ) -> None:
        self._state = state
        self._connection = connection
        self._erase_wanted = erase_wanted
        self._log = OnceLog(logger)
        self.is_done = False  # of this namespace

    def read(self, names: RedisKeys, epoch: int) -> None:
        """Apply the purges in Redis that are unknown here, and note those that Redis has lost."""
        state = self._state
        book = state.book
        found, now = self._connection.exchange(
            ("ZREVRANGE", names.purges, 0, MAX_PURGES - 1, "WITHSCORES"), ("TIME",)
        )
        now_s = int(now[0])
        ages = {
            member: min(max(now_s - float(score) / 1000, 0.0), state.settings.purge_retention_s)
            for member, score in zip(found[::2], found[1::2], strict=True)
        }
        # One purge of a tenant is enough for all that were published before now.
        applied: dict[bytes | None, Future[bool]] = {}
        forgets: dict[bytes, Forget] = {}
        for member in book.unknown(ages):
            purge = unpack_purge(member)
            if purge is None:
                forget = unpack_forget(member)
                if forget is not None:
                    forgets[member] = forget
                continue
            if purge.tenant not in applied:
                try:
                    what = Erasure(None, purge.tenant, purge.number, spread=False)
                    applied[purge.tenant] = self._erase_wanted(what)
                except Exception:
                    why = "a purge that another server told could not be applied"
                    self._log.fault(member.hex(), why)
                    continue
            with state.lock:
                if state.epoch != epoch:
                    return
                self._log.settle(member.hex())
                book.applied(member, ages[member], applied[purge.tenant])
        members = list(forgets)
        for at in range(0, len(members), _FORGETS_AT_ONCE):
            several = {each: forgets[each] for each in members[at : at + _FORGETS_AT_ONCE]}
            self._forget(names, epoch, several, ages)
        with state.lock:
            if state.epoch != epoch:
                return
            book.compare(set(ages))
        if not self.is_done:
            state.num_garbage += sum(
                unpack_purge(member) is None and unpack_forget(member) is None for member in ages
            )
        self.is_done = True
        state.mirror.choose()
        state.wake_publisher()

    def _forget(
        self, names: RedisKeys, epoch: int, forgets: dict[bytes, Forget], ages: dict[bytes, float]
    ) -> None:
        """Forget the pages that others forgot. One whose keys Redis has lost waits until a server
        that knows them adds them again; until then no page is exchanged with those that know."""
        state = self._state
        found = self._connection.exchange(
            *(("GETRANGE", names.keys(each.number), 0, MAX_KEYS_BYTES) for each in forgets.values())
        )
        for (member, forget), data in zip(forgets.items(), found, strict=True):
            keys = unpack_keys(data, forget)
            if keys is None:
                self._log.report(
                    member.hex(),
                    "the index lacks the keys of pages that another server forgot; waiting for a "
                    "server that knows them",
                )
                continue
            try:
                what = Erasure(unique_keys(keys), None, forget.number, spread=False)
                applied = self._erase_wanted(what)
            except Exception:
                self._log.fault(
                    member.hex(), "pages that another server forgot could not be forgotten here"
                )
                continue
            with state.lock:
                if state.epoch != epoch:
                    return
                self._log.settle(member.hex())
                state.book.applied(member, ages[member], applied, data)
