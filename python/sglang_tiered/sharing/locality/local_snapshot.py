"""Publishes what this server holds: a snapshot in Redis, and a stream of the changes since."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.sharing.locality.connection import IndexFailure
from sglang_tiered.sharing.locality.formats import (
    DELTA_PAGES,
    PIECE_PAGES,
    Delta,
    pack_delta,
    pack_piece,
    piece_range,
)
from sglang_tiered.sharing.locality.mirror import distinct

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from sglang_tiered.sharing.locality.connection import IndexConnection
    from sglang_tiered.sharing.locality.redis_keys import RedisKeys
    from sglang_tiered.sharing.locality.state import IndexState

    Fingerprints = npt.NDArray[np.uint64]

__all__ = ["LocalSnapshot", "SnapshotLostError"]

_DELTAS_AT_ONCE = 8
_RENEWED_AFTER = 32_768  # changes: with fewer a snapshot is not renewed
_STRANGE = ("ERR", "WRONGTYPE")  # another writer changed this server's stream
_EMPTY = np.zeros(0, np.uint64)


class SnapshotLostError(Exception):
    """Redis has lost what this server published."""


class LocalSnapshot:
    """Used by the publisher's thread only. It calls ``between`` between parts of a long write."""

    def __init__(
        self,
        state: IndexState,
        connection: IndexConnection,
        held: Callable[[int], tuple[int, Fingerprints] | None],
        between: Callable[[], None],
    ) -> None:
        self._state = state
        self._connection = connection
        self._held = held
        self._between = between
        self._expiry_ms = int(state.settings.expiry_s * 1000)
        self._version = 0
        self._pages = _EMPTY  # as published, sorted
        self._num_changes = 0  # since the snapshot
        self._unsure: list[tuple[int, Delta]] = []  # sent without an answer
        self.incarnation = 0
        self.sequence = 0
        self.snapshot = 0  # its sequence number; 0 without a snapshot
        self.snapshot_pages = 0
        self.is_news = False  # the record does not name it yet

    def discard(self) -> None:
        """Discard what was published: the next ``publish`` writes a new snapshot."""
        self.snapshot = 0
        self._unsure = []
        self._state.num_published_pages = 0

    def publish(self, names: RedisKeys, server: str) -> None:
        """Publish what changed. Raises ``IndexFailure``, or ``SnapshotLostError``: call again."""
        held = self._held(self._version if self.snapshot else 0)
        if self._unsure:
            self._find_arrived(names, server)
        if held is None:
            return
        version, found = held
        pages = distinct(found)
        if not self.snapshot:
            self._begin(names, server, pages)
        else:
            added, removed = _missing(pages, self._pages), _missing(self._pages, pages)
            num_changes = len(added) + len(removed)
            if num_changes > max(len(pages) // 2, 4 * DELTA_PAGES):
                self.discard()
                self._begin(names, server, pages)
            elif num_changes:
                self._send(names, server, added, removed)
                self._pages = pages
        self._version = version
        self._state.num_published_pages = len(pages)
        if self._num_changes > max(_RENEWED_AFTER, len(pages) // 4):
            self._renew(names, server)

    # ---- Snapshots ----

    def _begin(self, names: RedisKeys, server: str, pages: Fingerprints) -> None:
        """Publish everything under a new incarnation."""
        before = self.incarnation
        self.incarnation += 1
        self.sequence += 1
        changes = names.changes(server, self.incarnation)
        marker = pack_delta(server, self.sequence, Delta(_EMPTY, _EMPTY))
        self._write_snapshot(names, server, pages)
        self._connection.exchange(
            ("DEL", changes),
            ("XADD", changes, f"{self.sequence}-0", "d", marker),
            ("PEXPIRE", changes, self._expiry_ms),
            ("DEL", names.changes(server, before)),
        )
        self._adopt(pages)

    def _renew(self, names: RedisKeys, server: str) -> None:
        """Write a later snapshot of the same incarnation. The stream keeps the changes since the
        previous one, for readers that are a little behind."""
        before = self.snapshot
        self._write_snapshot(names, server, self._pages)
        changes = names.changes(server, self.incarnation)
        self._connection.exchange(("XTRIM", changes, "MINID", f"{before}-0"))
        self._adopt(self._pages)

    def _adopt(self, pages: Fingerprints) -> None:
        """Note that the snapshot of these pages is complete."""
        self._pages = pages
        self._num_changes = 0
        self.snapshot, self.snapshot_pages = self.sequence, len(pages)
        self.is_news = True
        self._state.num_snapshots_published += 1
        self._state.num_fingerprints_published += len(pages)

    def _write_snapshot(self, names: RedisKeys, server: str, pages: Fingerprints) -> None:
        """Write a snapshot under a key of its own, so that no reader gets a mixture. It expires if
        the write is abandoned; the previous one expires once its last readers are done."""
        key = names.pages(server, self.sequence)
        num_pieces = max(-(-len(pages) // PIECE_PAGES), 1)
        for piece in range(num_pieces):
            part = pages[piece * PIECE_PAGES : (piece + 1) * PIECE_PAGES]
            data = pack_piece(server, self.sequence, piece, part)
            self._connection.exchange(
                ("APPEND", key, data) if piece else ("SET", key, data),
                ("PEXPIRE", key, self._expiry_ms),
            )
            self._between()
        (length,) = self._connection.exchange(("STRLEN", key))
        if length != piece_range(num_pieces - 1, len(pages))[1] + 1:
            raise IndexFailure("it lost a part of what was written")

    # ---- Changes ----

    def _send(
        self, names: RedisKeys, server: str, added: Fingerprints, removed: Fingerprints
    ) -> None:
        key = names.changes(server, self.incarnation)
        deltas = [Delta(part, _EMPTY) for part in _parts(added)]
        deltas += [Delta(_EMPTY, part) for part in _parts(removed)]
        confirmed: list[Delta] = []
        try:
            for start in range(0, len(deltas), _DELTAS_AT_ONCE):
                self._send_some(key, server, deltas[start : start + _DELTAS_AT_ONCE], confirmed)
                self._between()
                if not self.snapshot:
                    raise SnapshotLostError
        except IndexFailure:
            self._apply(confirmed)
            raise

    def _send_some(
        self, key: str, server: str, deltas: list[Delta], confirmed: list[Delta]
    ) -> None:
        numbered = list(enumerate(deltas, self.sequence + 1))
        self._unsure = numbered
        answers = self._connection.try_exchange(
            *(
                ("XADD", key, "NOMKSTREAM", f"{number}-0", "d", pack_delta(server, number, delta))
                for number, delta in numbered
            )
        )
        self._unsure = []
        refused = next((each for each in answers if isinstance(each, IndexFailure)), None)
        arrived = [answer for answer in answers if isinstance(answer, bytes)]
        # A refused command before an accepted one leaves a gap.
        if None in answers or (refused and isinstance(answers[-1], bytes)):
            self.discard()
            raise SnapshotLostError
        for number, delta in numbered[: len(arrived)]:
            self._confirm(number, delta)
            confirmed.append(delta)
        if refused:
            if refused.word in _STRANGE:
                self.discard()
                raise SnapshotLostError
            raise refused

    def _confirm(self, number: int, delta: Delta) -> None:
        self.sequence = number
        num_changes = len(delta.added) + len(delta.removed)
        self._num_changes += num_changes
        self._state.num_fingerprints_published += num_changes

    def _apply(self, deltas: list[Delta]) -> None:
        """Note the changes that arrived, when not all did: additions come first."""
        if deltas:
            added = np.concatenate([delta.added for delta in deltas])
            removed = distinct(np.concatenate([delta.removed for delta in deltas]))
            self._pages = _missing(distinct(np.concatenate([self._pages, added])), removed)

    def _find_arrived(self, names: RedisKeys, server: str) -> None:
        """Ask Redis which of the changes that it did not confirm have arrived."""
        unsure, self._unsure = self._unsure, []
        if not self.snapshot:
            return
        key = names.changes(server, self.incarnation)
        (last,) = self._connection.exchange(("XREVRANGE", key, "+", "-", "COUNT", len(unsure) + 1))
        numbers = [int(entry[0].split(b"-")[0]) for entry in last]
        newer = sorted(number for number in numbers if number > self.sequence)
        arrived = unsure[: len(newer)]
        if not numbers or newer != [number for number, _ in arrived]:
            self.discard()
            raise SnapshotLostError
        for number, delta in arrived:
            self._confirm(number, delta)
        self._apply([delta for _, delta in arrived])


def _missing(these: Fingerprints, those: Fingerprints) -> Fingerprints:
    """The elements of ``these`` that are not in ``those``; both sorted."""
    if not len(those):
        return these
    places = np.searchsorted(those, these)
    places[places == len(those)] = 0
    missing: Fingerprints = these[those[places] != these]
    return missing


def _parts(pages: Fingerprints) -> list[Fingerprints]:
    return [pages[start : start + DELTA_PAGES] for start in range(0, len(pages), DELTA_PAGES)]
