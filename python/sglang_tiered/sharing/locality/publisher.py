"""Body of the thread that writes to Redis what this server holds, and its purges.

Other servers must never see a gap: a snapshot is complete before the record names it, and changes
carry consecutive numbers. When it is uncertain which of them are in Redis, the publisher asks
Redis, or publishes everything again under another incarnation."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from sglang_tiered.sharing.locality.connection import IndexFailure
from sglang_tiered.sharing.locality.formats import (
    ServerRecord,
    pack_record,
    pack_serving,
    unpack_forget,
)
from sglang_tiered.sharing.locality.local_snapshot import LocalSnapshot, SnapshotLostError
from sglang_tiered.sharing.locality.purges import MAX_PURGES
from sglang_tiered.sharing.locality.redis_keys import RedisKeys
from sglang_tiered.sharing.locality.state import new_server
from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.promises import keep

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from sglang_tiered.sharing.locality.applied_purges import AppliedPurges
    from sglang_tiered.sharing.locality.connection import Command, IndexConnection
    from sglang_tiered.sharing.locality.state import IndexState

    Held = Callable[[int], tuple[int, npt.NDArray[np.uint64]] | None]

__all__ = ["NEWS_ENTRIES", "Publisher"]

logger = logging.getLogger(__name__)

NEWS_ENTRIES = 64
_PURGES_AT_ONCE = 256
_FORGETS_AT_ONCE = 256
_TIDY_S = 30.0
_GONE_AT_ONCE = 256


class Publisher:
    """Used by its own thread only."""

    def __init__(
        self,
        state: IndexState,
        connection: IndexConnection,
        held: Held,
        memory: AppliedPurges | None = None,
    ) -> None:
        self._state = state
        self._memory = memory
        self._connection = connection
        self._expiry_ms = int(state.settings.expiry_s * 1000)
        self._retention_ms = int(state.settings.purge_retention_s * 1000)
        self._backoff = Backoff(0.1, min(state.settings.heartbeat_s, 5.0), spread=0.5)
        self._epoch = state.epoch
        self._names = state.names
        self._namespace = state.namespace
        self._own = LocalSnapshot(state, connection, held, self._beat_if_due)
        self._written: list[bytes] = []  # recent records, one of which is in Redis
        self._beat_at = self._publish_at = self._tidy_at = state.clock()
        self._digest = b""  # in the record
        self._announced = -1  # the last incarnation that others were woken for

    def run(self) -> None:
        while (orders := self._await_work()) is not None:
            pause_s = 0.0
            self._remember()
            try:
                self._work(bool(orders))
                self._state.trouble.answered("publisher")
                self._backoff.succeed()
                succeeded = True
            except IndexFailure as failure:
                succeeded = False
                if not self._state.closed:
                    self._state.trouble.failed("publisher", failure.clause)
                if not failure.is_out_of_memory:
                    self._connection.close()  # the next connection may reach another server
                pause_s = self._next_pause_s()
            except Exception:
                succeeded = False
                logger.exception("internal error while publishing to the locality index; retrying")
                self._own.discard()
                pause_s = self._next_pause_s()
            self._hand_on(orders, succeeded)
            if pause_s:
                self._pause(pause_s)
        self._leave()
        self._remember()
        self._connection.close()

    def _next_pause_s(self) -> float:
        now = self._state.clock()
        self._backoff.fail(now)
        return self._backoff.wait_s(now)

    def _remember(self) -> None:
        if self._memory is not None:
            try:
                self._memory.remember()
            except Exception:
                logger.exception("internal error while noting purges; a restart applies them again")

    # ---- Waiting ----

    def _await_work(self) -> list[Future[bool]] | None:
        state = self._state
        with state.lock:
            while not state.closed:
                due = (
                    bool(state.to_publish)
                    or state.book.num_due > 0
                    or state.epoch != self._epoch
                    or (state.beat_now and bool(self._own.snapshot))
                    or (state.address is not None and self._digest != state.book.digest)
                )
                wait_s = min(self._beat_at, self._publish_at) - state.clock()
                if due or wait_s <= 0:
                    orders, state.to_publish = state.to_publish, []
                    return orders
                state.publisher_wakes.wait(wait_s)
        return None

    def _pause(self, pause_s: float) -> None:
        state = self._state
        until = state.clock() + pause_s
        with state.lock:
            while not state.closed and (left_s := until - state.clock()) > 0:
                state.publisher_wakes.wait(left_s)

    def _hand_on(self, orders: list[Future[bool]], succeeded: bool) -> None:
        if not orders:
            return
        with self._state.lock:
            for order in orders:
                if succeeded and not self._state.closed:
                    self._state.to_read.append(order)
                else:
                    keep(order, False)
            self._state.look_now = True
            self._state.reader_wakes.notify_all()

    # ---- One round ----

    def _work(self, publish_now: bool) -> None:
        state = self._state
        with state.lock:
            epoch, namespace, address = state.epoch, state.namespace, state.address
        if epoch != self._epoch:
            self._remove_own()
            self._epoch, self._namespace, self._names = epoch, namespace, RedisKeys.of(namespace)
        self._beat_if_due()
        self._publish_purges()
        now = state.clock()
        if address is None:
            if now >= self._beat_at:
                self._connection.exchange(("PING",))
                self._beat_at = state.clock() + state.settings.heartbeat_s
        elif publish_now or now >= self._publish_at:
            try:
                self._own.publish(self._names, state.server)
            except SnapshotLostError:
                state.num_published_anew += 1
                self._own.publish(self._names, state.server)
            took_s = state.clock() - now
            # Large stores that change all the time take at most a tenth of a core.
            self._publish_at = state.clock() + max(state.settings.publish_s, 9 * took_s)
        if address is None:
            self._publish_at = state.clock() + state.settings.publish_s
            self._digest = state.book.digest
        elif (
            publish_now or self._own.is_news or state.beat_now or self._digest != state.book.digest
        ):
            self._beat()
        if state.clock() >= self._tidy_at:
            self._tidy()

    def _beat_if_due(self) -> None:
        if self._state.clock() >= self._beat_at and self._own.snapshot:
            self._beat()

    def _beat(self) -> None:
        """Give a sign of life: write the record, and extend the expiry of everything it names."""
        state, own, names = self._state, self._own, self._names
        with state.lock:
            server, address, serving = state.server, state.address, state.serving
            state.beat_now = False
        digest = state.book.digest
        if address is None or not own.snapshot:
            self._digest = digest
            return
        data = pack_record(
            ServerRecord(
                self._namespace,
                server,
                own.incarnation,
                own.sequence,
                own.snapshot,
                own.snapshot_pages,
                digest,
                address,
            )
        )
        self._written = [*self._written[-3:], data]
        own.is_news = False
        serves: list[Command] = []
        if serving is not None:
            told = pack_serving(server, serving)
            serves = [("SET", names.serves(server), told, "PX", self._expiry_ms)]
        before, *alive = self._connection.try_exchange(
            ("SET", names.record(server), data, "PX", self._expiry_ms, "GET"),
            ("PEXPIRE", names.record(server), self._expiry_ms),
            ("PEXPIRE", names.pages(server, own.snapshot), self._expiry_ms),
            ("PEXPIRE", names.changes(server, own.incarnation), self._expiry_ms),
            ("SADD", names.servers, server),
            ("PEXPIRE", names.servers, 10 * self._expiry_ms),
            ("PEXPIRE", names.purges, 2 * self._retention_ms),
            *serves,
        )
        refused = [answer for answer in (before, *alive) if isinstance(answer, IndexFailure)]
        if not refused and before is not None and before not in self._written:
            logger.warning("another server has the same id in the locality index; taking a new id")
            with state.lock:
                state.server = new_server()
            self._written = []
            self._start_anew()
        elif refused and refused[0].is_wrong_type:
            self._connection.exchange(("DEL", names.record(server)))
            self._start_anew()
        elif not isinstance(alive[1], IndexFailure) and 0 in alive[1:3]:
            self._start_anew()  # Redis lost it: emptied, evicted or expired
        if refused:
            own.is_news = True
            raise refused[0]
        self._digest = digest
        self._beat_at = state.clock() + state.settings.heartbeat_s
        if self._announced != own.incarnation and own.snapshot:
            self._announced = own.incarnation
            self._wake_others()

    def _start_anew(self) -> None:
        self._state.num_published_anew += 1
        self._own.discard()
        self._publish_at = self._state.clock()

    def _wake_others(self) -> None:
        self._connection.exchange(
            ("XADD", self._names.news, "MAXLEN", NEWS_ENTRIES, "*", "n", ""),
            ("PEXPIRE", self._names.news, 10 * self._expiry_ms),
        )

    # ---- Purges ----

    def _publish_purges(self) -> None:
        while due := self._state.book.due(_PURGES_AT_ONCE):
            now_ms = self._redis_ms()
            for namespace in {purge.namespace for purge in due}:
                names = RedisKeys.of(namespace)
                own = [purge for purge in due if purge.namespace == namespace]
                scored: list[bytes | str | int] = []
                keys: list[Command] = []
                for purge in own:
                    scored += [max(now_ms - int(purge.age_s * 1000), 0), purge.member]
                    forget = None if purge.keys is None else unpack_forget(purge.member)
                    if forget is not None and purge.keys is not None:
                        keys.append(self._set_keys(names, forget.number, purge.keys))
                self._connection.exchange(
                    *keys,  # first, as who reads the member reads them
                    ("ZADD", names.purges, "NX", *scored),
                    ("PEXPIRE", names.purges, 2 * self._retention_ms),
                    ("ZREMRANGEBYRANK", names.purges, 0, -MAX_PURGES - 1),
                )
                self._state.book.told(own)
            self._wake_others()

    def _set_keys(self, names: RedisKeys, number: bytes, keys: bytes) -> Command:
        return "SET", names.keys(number), keys, "PX", 2 * self._retention_ms

    def _redis_ms(self) -> int:
        (answer,) = self._connection.exchange(("TIME",))
        seconds, microseconds = answer
        return int(seconds) * 1000 + int(microseconds) // 1000

    def _tidy(self) -> None:
        """Remove purges past their retention, and servers without a record; add the keys of forgets
        that Redis has lost."""
        state = self._state
        now_ms = self._redis_ms()
        with state.lock:
            gone = list(state.gone)[:_GONE_AT_ONCE]
            state.gone.difference_update(gone)
        removal = [("SREM", self._names.servers, *gone)] if gone else []
        self._connection.exchange(
            ("ZREMRANGEBYSCORE", self._names.purges, "-inf", now_ms - self._retention_ms),
            *removal,
        )
        kept = state.book.kept_keys(_FORGETS_AT_ONCE)
        held = self._connection.exchange(*(("EXISTS", self._names.keys(each)) for each in kept))
        for (number, keys), is_held in zip(kept.items(), held, strict=True):
            if not is_held:
                self._connection.exchange(self._set_keys(self._names, number, keys))
        self._tidy_at = state.clock() + _TIDY_S

    # ---- Ends ----

    def _remove_own(self) -> None:
        """Remove what this server published from Redis, if it answers."""
        own, names, server = self._own, self._names, self._state.server
        if own.snapshot:
            self._connection.exchange(
                ("DEL", names.record(server)),
                ("DEL", names.serves(server)),
                ("DEL", names.pages(server, own.snapshot)),
                ("DEL", names.changes(server, own.incarnation)),
                ("SREM", names.servers, server),
                ("XADD", names.news, "MAXLEN", NEWS_ENTRIES, "*", "n", ""),
                ("PEXPIRE", names.news, 10 * self._expiry_ms),
            )
        own.discard()
        self._written = []

    def _leave(self) -> None:
        if self._connection.is_open:
            with contextlib.suppress(IndexFailure):  # the record expires
                self._remove_own()
        self._state.book.close()
