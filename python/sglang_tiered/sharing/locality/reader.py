"""Body of the thread that reads from Redis what other servers hold, and what they purge.

It waits in one blocking ``XREAD`` over the streams of all servers it knows and the stream of news;
with every heartbeat, and when news comes, it reads which servers live. Servers have random ids,
records expire by Redis' clock, and freshness is measured by this machine's: no two clocks are
compared.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_tiered.sharing.locality.connection import MAX_REPLY_BYTES, IndexFailure
from sglang_tiered.sharing.locality.formats import (
    DELTA_PAGES,
    MAX_PIECE_BYTES,
    MAX_RECORD_BYTES,
    PIECE_PAGES,
    ServerRecord,
    piece_range,
    unpack_delta,
    unpack_piece,
    unpack_record,
)
from sglang_tiered.sharing.locality.purge_reader import PurgeReader
from sglang_tiered.sharing.locality.redis_keys import RedisKeys
from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.promises import keep

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sglang_tiered.sharing.locality.connection import IndexConnection
    from sglang_tiered.sharing.locality.mirror import MirroredPeer
    from sglang_tiered.sharing.locality.purge_reader import EraseWanted
    from sglang_tiered.sharing.locality.state import IndexState

__all__ = ["Reader"]

logger = logging.getLogger(__name__)

_BLOCK_S = 0.5  # bounds the delay of a request to look now
_LOOK_GAP_S = 0.05  # between two looks, however much news comes
_AGREE_S = 0.2  # between two looks while a server that forgets waits for the others
_RELOAD_S = 60.0  # between two reads of a server's snapshot for pages that did not fit
_MAX_GONE = 4096
_SERVER_CHARS = 32
_DELTA_BYTES = 8 * DELTA_PAGES + 256


class Reader:
    """Used by its own thread only."""

    def __init__(
        self,
        state: IndexState,
        connection: IndexConnection,
        erase_wanted: EraseWanted,
    ) -> None:
        self._state = state
        self._connection = connection
        self._backoff = Backoff(0.1, min(state.settings.heartbeat_s, 5.0), spread=0.5)
        self._epoch = -1
        self._names = state.names
        self._namespace = state.namespace
        self._look_at = state.clock()
        self._looked = float("-inf")
        self._news = ""  # id of the last news seen
        self._purges = PurgeReader(state, connection, erase_wanted)
        self._is_poisoned = False  # some stream cannot be read together with others

    def run(self) -> None:
        while (orders := self._next_orders()) is not None:
            try:
                self._round(orders)
                self._state.trouble.answered("reader")
                self._backoff.succeed()
            except IndexFailure as failure:
                self._end(orders, succeeded=False)
                if not self._state.closed:
                    self._state.trouble.failed("reader", failure.clause)
                self._connection.close()
                self._look_at = self._state.clock()
                self._pause()
            except Exception:
                self._end(orders, succeeded=False)
                logger.exception("internal error while reading the locality index; retrying")
                self._pause()
        self._connection.close()

    # ---- Waiting ----

    def _next_orders(self) -> list[Future[bool]] | None:
        state = self._state
        with state.lock:
            if state.closed:
                return None
            orders, state.to_read = state.to_read, []
            if state.look_now or orders:
                state.look_now = False
                self._look_at = state.clock()
            return orders

    def _pause(self) -> None:
        state = self._state
        self._backoff.fail(state.clock())
        with state.lock:
            while not state.closed and (left_s := self._backoff.wait_s(state.clock())) > 0:
                state.reader_wakes.wait(left_s)

    def _end(self, orders: list[Future[bool]], *, succeeded: bool) -> None:
        for order in orders:
            keep(order, succeeded)

    # ---- One round ----

    def _round(self, orders: list[Future[bool]]) -> None:
        state = self._state
        with state.lock:
            epoch, namespace = state.epoch, state.namespace
        if epoch != self._epoch:
            self._epoch, self._namespace, self._names = epoch, namespace, RedisKeys.of(namespace)
            self._purges.is_done = False
            self._news = ""
            self._look_at = state.clock()
            state.mirror.begin_namespace(epoch)
        if state.clock() >= self._look_at:
            self._look()
        self._load_snapshots()
        if orders:
            while self._read_changes(0.0) or self._lacks_snapshots():
                if state.closed:
                    break
                if state.clock() >= self._look_at:
                    self._look()
                self._load_snapshots()
            state.mirror.choose()
            self._end(orders, succeeded=True)
            return
        left_s = max(self._look_at - state.clock(), 0.001)
        self._read_changes(min(left_s, _BLOCK_S, state.settings.index_timeout_s / 2))
        state.mirror.choose()  # a peer may no longer have to be avoided

    def _look(self) -> None:
        """Read which servers live, and which purges there are."""
        state, names, mirror = self._state, self._names, self._state.mirror
        began = state.clock()
        if not self._news:
            (last,) = self._connection.exchange(("XREVRANGE", names.news, "+", "-", "COUNT", 1))
            self._news = _text(last[0][0]) if last else "0-0"
        limit = 2 * state.settings.max_peers
        sample, num_purges = self._connection.exchange(
            ("SRANDMEMBER", names.servers, limit), ("ZCARD", names.purges)
        )
        known = {peer.record.server for peer in mirror.peers}
        sampled = {_text(member) for member in sample if len(member) == _SERVER_CHARS}
        servers = sorted((known | {s for s in sampled if _is_id(s)}) - {state.server})
        records = self._records(servers)
        mirror.update(records, began + state.settings.expiry_s)
        digest = state.book.digest
        if (
            not self._purges.is_done
            or num_purges != len(state.book)
            or any(record.purges != digest for record in records)
        ):
            self._purges.read(self._names, self._epoch)
        if all(record.purges == digest for record in records):
            state.book.agreed(digest)
        self._looked = state.clock()
        pause_s = state.settings.heartbeat_s
        if state.book.is_spreading:
            pause_s = min(pause_s, _AGREE_S)
        self._look_at = self._looked + pause_s

    def _look_soon(self) -> None:
        self._look_at = min(self._look_at, max(self._state.clock(), self._looked + _LOOK_GAP_S))

    def _records(self, servers: list[str]) -> list[ServerRecord]:
        if not servers:
            return []
        state, names = self._state, self._names
        found = self._connection.try_exchange(
            *(("GETRANGE", names.record(each), 0, MAX_RECORD_BYTES) for each in servers)
        )
        records, gone = [], []
        for server, data in zip(servers, found, strict=True):
            if isinstance(data, IndexFailure):
                if not data.is_wrong_type:
                    raise data
                state.num_garbage += 1
                continue
            record = unpack_record(data, self._namespace, server) if data else None
            if record is not None:
                records.append(record)
            elif data:
                state.num_garbage += 1
            else:
                gone.append(server)
        with state.lock:
            state.gone = set(gone[:_MAX_GONE])
        return records

    # ---- Snapshots ----

    def _load_snapshots(self) -> None:
        state = self._state
        for known in state.mirror.peers:
            now = state.clock()
            if state.closed or now >= self._look_at:
                return  # the other snapshots come after the next look
            reloads = known.is_loaded and now >= known.loaded_at + _RELOAD_S
            if reloads and state.mirror.may_hold_more(known):
                state.mirror.unload(known)
            if not known.is_loaded and now >= known.retry_at and not self._load(known):
                known.num_failures += 1
                known.retry_at = now + min(
                    state.settings.heartbeat_s * 2.0 ** min(known.num_failures, 10), _RELOAD_S
                )

    def _lacks_snapshots(self) -> bool:
        now = self._state.clock()
        return any(not each.is_loaded and each.retry_at <= now for each in self._state.mirror.peers)

    def _load(self, known: MirroredPeer) -> bool:
        """Read a server's snapshot. Returns False if it is not whole."""
        state, mirror, record = self._state, self._state.mirror, known.record
        key = self._names.pages(record.server, record.snapshot)
        if known.num_pages:
            mirror.unload(known)
        num_pieces = max(-(-record.num_pages // PIECE_PAGES), 1)
        for piece in range(num_pieces):
            if mirror.is_full:
                known.num_cut += record.num_pages - piece * PIECE_PAGES
                break
            start, end = piece_range(piece, record.num_pages)
            try:
                (data,) = self._connection.exchange(("GETRANGE", key, start, end))
            except IndexFailure as failure:
                if not failure.is_wrong_type:
                    raise
                data = None
            pages = unpack_piece(data, record.server, record.snapshot, piece)
            if pages is None:
                state.num_garbage += data != b""
                mirror.unload(known)
                return False
            mirror.add_pages(known, pages)
            state.num_fingerprints_read += len(pages)
        mirror.loaded(known, record.snapshot)
        state.num_snapshots_read += 1
        return True

    # ---- Changes ----

    def _read_changes(self, block_s: float) -> bool:
        """Wait for changes and apply them. Returns whether there were any."""
        loaded = {
            self._names.changes(known.record.server, known.record.incarnation): known
            for known in self._state.mirror.peers
            if known.is_loaded
        }
        if self._is_poisoned:
            return self._read_one_by_one(loaded, block_s)
        count = max(min(MAX_REPLY_BYTES // 2 // _DELTA_BYTES // (len(loaded) + 1), 32), 1)
        positions = [f"{known.position}-0" for known in loaded.values()]
        waiting = ("BLOCK", max(int(block_s * 1000), 1)) if block_s else ()
        command = (
            *("XREAD", "COUNT", count, *waiting, "STREAMS"),
            *(self._names.news, *loaded, self._news, *positions),
        )
        try:
            (answer,) = self._connection.exchange(command)
        except IndexFailure as failure:
            self._is_poisoned = failure.is_wrong_type or failure.is_too_large
            if self._is_poisoned:
                return True
            raise
        return self._apply(answer, loaded)

    def _read_one_by_one(self, loaded: dict[str, MirroredPeer], block_s: float) -> bool:
        """Like ``_read_changes``, but stream by stream, to find the one that cannot be read."""
        was_any, self._is_poisoned = False, False
        for key, known in loaded.items():
            try:
                (answer,) = self._connection.exchange(
                    ("XREAD", "COUNT", 1, "STREAMS", key, f"{known.position}-0")
                )
            except IndexFailure as failure:
                if not failure.is_wrong_type and not failure.is_too_large:
                    raise
                self._distrust(known)
                continue
            was_any = self._apply(answer, {key: known}) or was_any
        try:
            (answer,) = self._connection.exchange(
                ("XREAD", "COUNT", 1, "STREAMS", self._names.news, self._news)
            )
            self._apply(answer, {})
        except IndexFailure as failure:
            if not failure.is_wrong_type and not failure.is_too_large:
                raise
            self._is_poisoned = True  # the news cannot be read: look with every heartbeat instead
            self._state.num_garbage += 1
            self._wait(block_s)
        return was_any

    def _wait(self, wait_s: float) -> None:
        state = self._state
        with state.lock:
            if not state.closed and not state.look_now and wait_s:
                state.reader_wakes.wait(wait_s)

    def _distrust(self, known: MirroredPeer) -> None:
        """Drop a server whose values are invalid; its snapshot is read again, with growing
        pauses."""
        self._state.num_garbage += 1
        self._state.mirror.unload(known)
        known.num_failures += 1
        known.retry_at = self._state.clock() + min(
            self._state.settings.heartbeat_s * 2.0 ** min(known.num_failures, 10), _RELOAD_S
        )

    def _apply(self, answer: Any, loaded: dict[str, MirroredPeer]) -> bool:
        for key, entries in answer or ():
            known = loaded.get(_text(key))
            if known is None:
                if entries and _text(key) == self._names.news:
                    self._news = _text(entries[-1][0])
                    self._look_soon()
                continue
            for number, fields in entries:
                if not self._apply_one(known, _text(number), fields):
                    break
        return bool(answer)

    def _apply_one(self, known: MirroredPeer, number: str, fields: Any) -> bool:
        state, mirror = self._state, self._state.mirror
        sequence, _, rest = number.partition("-")
        if int(sequence) > known.position + 1 and not known.num_failures:
            # This reader fell behind what the stream keeps: the snapshot is newer.
            mirror.unload(known)
            known.num_failures = 1
            self._look_soon()
            return False
        if int(sequence) != known.position + 1 or rest != "0" or len(fields or ()) != 2:
            self._distrust(known)
            return False
        delta = unpack_delta(fields[1], known.record.server, int(sequence))
        if delta is None:
            self._distrust(known)
            return False
        mirror.add_pages(known, delta.added)
        mirror.remove_pages(known, delta.removed)
        known.position += 1
        known.num_failures = 0
        state.num_fingerprints_read += len(delta.added) + len(delta.removed)
        return True


def _text(data: bytes) -> str:
    return data.decode("ascii", errors="replace")


def _is_id(text: str) -> bool:
    return len(text) == _SERVER_CHARS and all(char in "0123456789abcdef" for char in text)


assert MAX_REPLY_BYTES > 4 * MAX_PIECE_BYTES
