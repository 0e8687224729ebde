"""Applies the purges of other servers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_tiered.sharing.locality.formats import unpack_purge
from sglang_tiered.sharing.locality.purges import MAX_PURGES
from sglang_tiered.storage.backoff import OnceLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from sglang_tiered.sharing.locality.connection import IndexConnection
    from sglang_tiered.sharing.locality.redis_keys import RedisKeys
    from sglang_tiered.sharing.locality.state import IndexState

    PurgeWanted = Callable[[bytes | None], Future[bool] | None]

__all__ = ["PurgeReader"]

logger = logging.getLogger(__name__)


class PurgeReader:
    """Used by the reader's thread only."""

    def __init__(
        self,
        state: IndexState,
        connection: IndexConnection,
        purge_wanted: PurgeWanted,
    ) -> None:
        self._state = state
        self._connection = connection
        self._purge_wanted = purge_wanted
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
        applied: dict[bytes | None, Future[bool] | None] = {}
        for member in book.unknown(ages):
            purge = unpack_purge(member)
            if purge is None:
                continue
            if purge.tenant not in applied:
                try:
                    applied[purge.tenant] = self._purge_wanted(purge.tenant)
                except Exception:
                    why = "a purge that another server told could not be applied"
                    self._log.fault(member.hex(), why)
                    continue
            with state.lock:
                if state.epoch != epoch:
                    return
                self._log.settle(member.hex())
                book.applied(member, ages[member], applied[purge.tenant])
        with state.lock:
            if state.epoch != epoch:
                return
            book.compare(set(ages))
        if not self.is_done:
            state.num_garbage += sum(unpack_purge(member) is None for member in ages)
        self.is_done = True
        state.mirror.choose()
        state.wake_publisher()
