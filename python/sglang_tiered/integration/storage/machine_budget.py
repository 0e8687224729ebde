"""A store's share of the NVMe that servers on this machine divide among each other.

Sums hold at every moment, also of a death in between. The store's capacity is lowered first, and
its record then; the record is raised first, and the capacity then.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.config import MIN_REGIONS
from sglang_tiered.errors import ConfigError, StoreError, StoreLockedError
from sglang_tiered.flags import format_bytes
from sglang_tiered.policy.shares import StoreShare, grant, recall
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.machine_budget import (
    FLAG,
    BudgetRecords,
    StoreRecord,
    Table,
    refuse_terms,
    trim_closed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.storage.region.reclaim import CapacityControl, CapacityState


logger = logging.getLogger(__name__)

TICK_S = 0.5
_SHRINK_S = 1.0  # waited for in a tick: what takes longer is published by the next
_JOIN_S = 60.0
_POLL_S = 0.02
_CLOSE_S = 10.0
_SILENT_TICKS = 20  # of a server that was asked for bytes
_JOINING_TICKS = round(_JOIN_S / TICK_S)  # of one that wants some, and may not be open yet
_TOLD_SHARE = 0.1  # of the total: so much of a change is a line in the log


@dataclass(frozen=True, slots=True)
class BudgetStats:
    """The budget of all stores, and this store's part of it. ``borrowed_bytes`` is above its floor,
    and ``due_bytes`` of that were asked back."""

    total_bytes: int
    floor_bytes: int
    borrowed_bytes: int
    due_bytes: int


def check_budget(config: TieredConfig) -> None:
    """Refuse what could not join, before a model is loaded. Raises ``ConfigError`` and
    ``StoreError``."""
    nvme = config.nvme
    if nvme is None or nvme.budget_directory is None or nvme.floor_bytes is None:
        return
    directory, place = Path(nvme.budget_directory), Path(nvme.directory).resolve()
    if directory.resolve() == place or place in directory.resolve().parents:
        raise ConfigError(f"{FLAG} {directory} is in its --tier-dir; pass a directory beside it.")
    records = BudgetRecords(
        directory, place, total_bytes=nvme.capacity_bytes, floor_bytes=nvme.floor_bytes
    )
    with records.table(_JOIN_S) as table:
        ours = {name for name, each in table.records.items() if place in Path(each.shard).parents}
        refuse_terms(directory, table, nvme.capacity_bytes, nvme.floor_bytes, ours)


class MachineBudget:
    """Joins a store before it is opened, and moves its capacity from then on until ``close``."""

    def __init__(
        self,
        directory: Path,
        shard: Path,
        *,
        total_bytes: int,
        floor_bytes: int,
        region_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises as ``BudgetRecords.join`` does, and ``ConfigError`` where the others do not give
        back in time what a store needs at least."""
        self._total_bytes = total_bytes
        self._floor_bytes = floor_bytes
        self._records = BudgetRecords(
            directory, shard, total_bytes=total_bytes, floor_bytes=floor_bytes
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = OnceLog(logger)
        self._store: CapacityControl | None = None
        self._due_bytes = 0
        self._asked: dict[str, tuple[StoreShare, int]] = {}  # and for how many ticks it is so
        try:
            self.capacity_bytes = self._join(clock() + _JOIN_S, clock, region_bytes)
        except BaseException:
            self._records.leave()
            raise
        self._told_bytes = self.capacity_bytes
        logger.info(
            "NVMe budget %s: %s of %s for now, at least %s",
            directory,
            *map(format_bytes, (self.capacity_bytes, total_bytes, floor_bytes)),
        )

    def _join(self, deadline: float, clock: Callable[[], float], region_bytes: int) -> int:
        """Return what the store may have as it is opened. The files of one that never shared may be
        more than others left: they are asked, and time is given them."""
        joined, least, cap_bytes = False, MIN_REGIONS * region_bytes, 0
        while True:
            is_late = clock() > deadline
            try:
                joined = joined or self._records.join()
                if joined:
                    with self._records.table() as table:
                        joined = table.is_whole  # or what others hold would be taken
                        if not joined:
                            self._records.leave()  # or two that join would wait for each other
                        if joined:
                            mine = self._mine(table, 0)
                            self._take(table, mine)
                            cap_bytes = mine.cap_bytes
                    if joined and cap_bytes >= max(least, self._records.needed_bytes):
                        return cap_bytes
            except StoreLockedError:
                raise
            except (OSError, StoreError):  # a disk that is busy; somebody holds the table for long
                if is_late:
                    raise
            if is_late:
                self._refuse_late(joined, cap_bytes, least)
                return cap_bytes
            self._stop.wait(TICK_S)

    def _refuse_late(self, joined: bool, cap_bytes: int, least_bytes: int) -> None:
        """Raise ``ConfigError`` where the others left too little in all that time."""
        if not joined:
            raise ConfigError(f"{FLAG}: a live server does not write its record; restart it.")
        if self._records.has_pins and cap_bytes < self._records.needed_bytes:
            raise ConfigError(
                f"{FLAG}: pins may need {format_bytes(self._records.needed_bytes)}, and the others "
                f"leave {format_bytes(cap_bytes)}; start it once without {FLAG} and unpin, or "
                "lower the floors of the others."
            )
        if cap_bytes < least_bytes:
            raise ConfigError(
                f"{FLAG}: the others leave {format_bytes(cap_bytes)}, less than the "
                f"{format_bytes(least_bytes)} that a store needs: pins keep what they hold, or one "
                "hangs; unpin there, or restart it."
            )

    def start(self, store: CapacityControl) -> None:
        """Move the capacity of the store, which was opened with ``capacity_bytes``, from now on."""
        self._store = store
        self._thread = threading.Thread(target=self._run, name="tier-budget", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Move it no more. Once the store is closed, ``leave`` lets others have what it does not
        need. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)  # the disk of the records may hang

    def leave(self) -> None:
        self.close()
        self._records.leave()

    def stats(self) -> BudgetStats:
        capacity = self.capacity_bytes
        borrowed = max(capacity - self._floor_bytes, 0)
        return BudgetStats(self._total_bytes, self._floor_bytes, borrowed, self._due_bytes)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            try:
                self.tick()
                self._log.settle("tick")
            except StoreError as error:
                self._log.report("tick", "%s; the NVMe tier stays at its size until it can", error)
            except Exception:
                self._log.fault("tick", "internal error of the NVMe budget; the tier stays as is")

    def tick(self) -> None:
        """Say how the store stands, and take or give what is due."""
        store = self._store
        assert store is not None
        with self._records.table() as table:
            if self._stop.is_set():
                return
            self._records.hold()
            now = store.room()
            mine = self._mine(table, now.capacity_bytes)
            self._note(mine, now)
            if table.is_whole:
                self._take(table, mine)
        if mine.cap_bytes > now.capacity_bytes and not now.is_shrinking:
            # What the record allows since it was written.
            store.set(min(mine.cap_bytes, self._total_bytes))
        elif mine.due_bytes < mine.cap_bytes:
            self._give(store, mine.due_bytes)
        self._tell(store.room().capacity_bytes)

    def _give(self, store: CapacityControl, due_bytes: int) -> None:
        store.set(due_bytes)
        deadline = time.monotonic() + _SHRINK_S
        while store.room().is_shrinking and time.monotonic() < deadline:
            self._stop.wait(_POLL_S)
            if self._stop.is_set():
                return
        with self._records.table() as table:
            now = store.room()
            self._note(self._mine(table, now.capacity_bytes), now)

    def _mine(self, table: Table, capacity_bytes: int) -> StoreRecord:
        mine = table.records.get(self._records.name)
        return self._records.enter(table, capacity_bytes) if mine is None else mine

    def _note(self, mine: StoreRecord, now: CapacityState) -> None:
        """Write how the store stands into its record."""
        is_lowered = mine.due_bytes < mine.cap_bytes
        mine.cap_bytes = min(mine.cap_bytes, now.capacity_bytes) if is_lowered else mine.cap_bytes
        mine.is_live, mine.held_bytes = True, now.held_bytes
        mine.keeps_bytes, mine.wants_bytes = now.keeps_bytes, now.wants_bytes
        mine.coldest_s = float(f"{now.coldest_s:.2g}")  # what rests is not written again
        if now.keeps_bytes > mine.due_bytes and not now.is_shrinking:
            mine.due_bytes = now.keeps_bytes  # that is all for now
        mine.due_bytes = max(mine.due_bytes, mine.floor_bytes)
        self._due_bytes = max(mine.cap_bytes - mine.due_bytes, 0)

    def _take(self, table: Table, mine: StoreRecord) -> None:
        """Take what is there, and ask others for the rest."""
        name, total = self._records.name, table.total_bytes
        members = {other: _member(each) for other, each in table.records.items()}
        self._count_silent(members)
        given = grant(total, members, name)
        if given:
            mine.cap_bytes += given
            mine.due_bytes = mine.cap_bytes
            members[name] = members[name]._replace(
                cap_bytes=mine.cap_bytes, due_bytes=mine.cap_bytes
            )
        for other, due in recall(total, members, name).items():
            lender = table.records[other]
            if lender.is_live:
                continue
            if trim_closed(Path(lender.shard), due):
                lender.cap_bytes = lender.due_bytes = lender.held_bytes = due
                members[other] = members[other]._replace(cap_bytes=due, due_bytes=due)
            else:  # this time: others are asked in its place
                members[other] = members[other]._replace(keeps_bytes=lender.cap_bytes)
                self._log.report(
                    lender.shard,
                    "NVMe budget: %s of %s, which no server has open, cannot be used now: it "
                    "cannot be changed",
                    format_bytes(lender.cap_bytes),
                    lender.shard,
                )
        for other, due in recall(total, members, name).items():
            if table.records[other].is_live:
                table.records[other].due_bytes = due
        excess = sum(each.cap_bytes for each in members.values()) - total
        if excess > 0 and mine.cap_bytes > mine.floor_bytes:  # the table was lost meanwhile
            mine.due_bytes = max(mine.cap_bytes - excess, mine.floor_bytes, mine.keeps_bytes)

    def _count_silent(self, members: dict[str, StoreShare]) -> None:
        """Have a live server that was asked for bytes, or wants some, and stopped answering, count
        as one that keeps what it has. Others are asked in its place, and go before it."""
        for other, each in members.items():
            if other == self._records.name:
                continue
            before, ticks = self._asked.get(other, (each, -1))
            hangs = each == before if each.asked_bytes else each[1:3] == before[1:3]
            has_part = each.pending_bytes or each.asked_bytes
            ticks = ticks + 1 if hangs and has_part else 0
            self._asked[other] = each, ticks
            most = _SILENT_TICKS if each.pending_bytes else _JOINING_TICKS
            if each.is_live and ticks >= most:
                members[other] = each._replace(
                    due_bytes=each.cap_bytes, keeps_bytes=each.cap_bytes, wants_bytes=0
                )

    def _tell(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        if abs(capacity_bytes - self._told_bytes) >= _TOLD_SHARE * self._total_bytes:
            self._told_bytes = capacity_bytes
            logger.info(
                "NVMe budget: %s of %s for now",
                *map(format_bytes, (capacity_bytes, self._total_bytes)),
            )


def _member(each: StoreRecord) -> StoreShare:
    return StoreShare(**{field: getattr(each, field) for field in StoreShare._fields})
