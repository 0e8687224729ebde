"""Which region to evict, what to save from it, and its eviction. Evicts before anything is created,
so the cap holds at every moment.

What is saved goes back into the log as stores do. Of pinned pages the new copy is found only once
it is durable, and the region's file goes only then, as far as there is room for both. So whenever
the process dies, a sync fails or the power goes, one copy is found.
"""

from __future__ import annotations

import errno
import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.base import Job, JobKind, Reason, Run
from sglang_tiered.storage.filesystem import FULL_ERRNOS
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import MAX_EXTENT_PAGES, padded
from sglang_tiered.storage.region.pending import (
    MAX_EXTENT_BYTES,
    StoreTicket,
    Wanted,
    plan_spans,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from sglang_tiered.storage.region.disk import Disk
    from sglang_tiered.storage.region.index import PageIndex
    from sglang_tiered.storage.region.reader import RegionReader
    from sglang_tiered.storage.region.regions import Region


_T = TypeVar("_T")
# Of what is written. Reinsertion multiplies it by at most 1 / (1 - 1/10) = 1.11.
REINSERTION_SHARE = 1 / 10
# What victims without hot pages leave over is saved for later ones, up to this share of a region,
# and to what may lie in memory on its way back into the log.
_MAX_CREDIT = 1 / 2
MAX_SAVED_BYTES = 64 << 20
_WANTED_REGIONS = 4  # so much free room a store that is written to would like to have
_WRITING_S = 60.0  # since it made a region
_STUCK_S = 60.0  # after which room that could not be given back is tried again
_MAX_VICTIMS = 8  # tried for one that can be removed; without one, stores pause before the next


def choose_victim(
    regions: Iterable[Region],
    useless: Iterable[Region],
    burden: Callable[[Region], int] = lambda region: 0,
) -> Region | None:
    """Return a region without a page that any lookup could find, else the oldest sealed one: with
    reinsertion, first in first out loses the fewest hits, as in CacheLib Navy. A region that is
    being read frees nothing until the read ends, so such regions go last, and behind them those
    with a ``burden``, the lightest first. Regions and those that are ``useless`` come the oldest
    first, and are looked at until one is neither read nor a burden."""
    victim: Region | None = None
    least = (0, False)
    for region in filter(_may_go, itertools.chain(useless, regions)):
        cost = burden(region), region.pins > region.syncing
        if victim is None or cost < least:
            victim, least = region, cost
        if not any(cost):
            break
    return victim


def _may_go(region: Region) -> bool:
    return region.sealed and region.num_writing == 0


def earned_credit(credit_bytes: float, region_bytes: int) -> float:
    """Return what may be saved of the next victim, in bytes: what is left of before, and the share
    of a region of that size that is about to go."""
    earned = credit_bytes + region_bytes * REINSERTION_SHARE
    return min(earned, region_bytes * _MAX_CREDIT, MAX_SAVED_BYTES)


class Reclaimer:
    """Makes room under the cap. Called by the writer thread only, without the lock held.

    ``pin_timeout_s`` bounds the wait for readers of a region that is already unlinked. A region
    whose file cannot be removed stays in service, takes its room, and is passed over with growing
    pauses. Chosen again and again as the oldest, it would keep all others from giving theirs.
    """

    def __init__(
        self, disk: Disk, reader: RegionReader, region_bytes: int, pin_timeout_s: float
    ) -> None:
        self._disk, self._state, self._reader = disk, disk.state, reader
        self._region_bytes = region_bytes
        self._pin_timeout_s = pin_timeout_s
        self._credit_bytes = 0.0
        self.leaving: Region | None = None  # goes once its pinned pages are in the region made last
        self.stuck: dict[Region, Backoff] = {}  # whose file could not be removed
        self.num_pages_evicted = 0
        self.last_made_s = -math.inf  # when room for a region was asked for

    def reserve(self, nbytes: int) -> bool:
        """Reserve room for a new region, evicting as needed; false when nothing can go. While there
        are pins, room for one more stays free, so that pinned pages are written again before their
        region goes. Where that is all there is, ``leaving`` is the region."""
        self.leaving = None
        self.last_made_s = self._disk.clock()
        while True:
            with self._state.lock:
                if self.has_room(nbytes):
                    self._state.regions.reserve(nbytes)
                    return True
                if self._state.pins.bound_bytes and self._room() >= nbytes:
                    self.leaving = self.next_leaving()
                    if self.leaving is not None:
                        self._state.regions.reserve(nbytes)
                        return True
                goes_round = self._room() >= nbytes and self._goes_round(self.next_victim())
            if goes_round or not self.evict_one():
                return self._reserve_for_saved(nbytes)

    def _reserve_for_saved(self, nbytes: int) -> bool:
        """Reserve the spare room for pages saved out of a region that is gone. They are in memory
        alone, and no other file can go now. False for other stores."""
        with self._state.lock:
            stores = self._state.stores
            is_room = bool(stores) and stores[0].reinserted and self._room() >= nbytes
            if is_room:
                self._state.regions.reserve(nbytes)
            return is_room

    def keep_spare(self) -> None:
        """Free room for a region, for the first pin of a full store. Without it the pinned pages of
        the next victim would be in memory alone until they are written again. Where each region has
        some, none goes."""
        while True:
            with self._state.lock:
                is_spare = self._room() >= self._region_bytes
                victim = None if is_spare else self.next_victim()
            if victim is None or self.has_pinned(victim) or not self.evict(victim):
                return

    def has_room(self, nbytes: int) -> bool:
        """Return whether a region of that size can be made without evicting. The caller holds the
        lock."""
        is_spare = len(self._state.pins) and self._state.pins.bound_bytes
        return self._room() >= (2 * nbytes if is_spare else nbytes)

    def _room(self) -> int:
        return self._state.capacity_bytes - self._state.regions.physical_bytes

    def next_victim(self) -> Region | None:
        """Return the region that would go next, which a pin keeps only where one keeps all. The
        caller holds the lock."""
        return self._choose(self._pinned_in)

    def next_leaving(self) -> Region | None:
        """Return the best victim, if it has pinned pages. The caller holds the lock."""
        victim = self._choose(self._heavy_bytes)
        if victim is None or not self._pinned_in(victim) or self._goes_round(victim):
            return None
        return victim

    def _goes_round(self, victim: Region | None) -> bool:
        """Whether a region has what was moved last, and most of it: moved again, that leaves no
        more room than now. The caller holds the lock."""
        if victim is None or not self._heavy_bytes(victim):
            return False
        return victim.sequence == max(region.sequence for region in self._state.regions)

    def _choose(self, burden: Callable[[Region], int]) -> Region | None:
        regions = filter(self._may_try, self._state.regions)
        return choose_victim(regions, filter(self._may_try, self._useless()), burden)

    def _pinned_in(self, region: Region) -> int:
        return self._state.index.pinned_in(region.slot)

    def _heavy_bytes(self, region: Region) -> int:
        """Return the pinned bytes of a region that has them in more than half of it. It is left
        alone, as the bound on pins leaves others, each of which frees as much as it costs."""
        pinned = self._pinned_in(region)
        return pinned if 2 * pinned > region.nbytes else 0

    def evict_one(self) -> bool:
        """Remove the best victim that can be removed, one without pinned pages if there is any. Put
        what is hot in it back into the queue of stores. False without a victim, or when its readers
        keep its space."""
        for _ in range(_MAX_VICTIMS):
            with self._state.lock:
                victim = self.next_victim()
            if victim is None:
                return False
            gone = self.evict(victim)
            if gone is not None:
                return gone
        return False

    def give_up(self, nbytes: int) -> bool:
        """Remove regions of so many bytes, which may be smaller ones of an earlier run, whatever of
        them the disk gets back; false without."""
        left = self._state.regions.physical_bytes - nbytes
        while self._state.regions.physical_bytes > left:
            if not self.evict_one():
                return False
        return True

    def with_room(self, write: Callable[[], _T]) -> _T:
        """Write a small file, once more with the room of a region where there is none for it.
        Raises ``OSError``."""
        try:
            return write()
        except OSError as error:
            if error.errno not in FULL_ERRNOS or not self.evict_one():
                raise
            return write()

    def own_victim(self, tenant: bytes) -> Region | None:
        """Return the oldest region that can make room within a tenant's share, which holds as much
        of it as of others; None without one. Others must not pay for that share: their pages are
        saved, so no more is written again than the tenant gets. Where it has less, others write
        more than it does, and reclaim comes round without it. Its own pinned pages are saved as
        well, and so count with the others'."""
        index = self._state.index

        def is_own(region: Region, pinned_bytes: int = 0) -> bool:
            own = region.tenant_bytes.get(tenant, 0) - pinned_bytes
            others = sum(region.tenant_bytes.values()) - own
            return 0 < own >= others <= MAX_SAVED_BYTES and not region.num_foreign

        with self._state.lock:
            for region in filter(self._may_try, self._state.regions):
                is_free = _may_go(region) and region.pins == region.syncing
                # What is pinned is asked for last, as it takes a look into the index.
                if not is_free or not is_own(region):
                    continue
                if is_own(region, index.pinned_bytes_of(region.slot, tenant)):
                    return region
        return None

    def evict(self, victim: Region, besides: bytes | None = None) -> bool | None:
        """Remove a region, and put what is hot or pinned in it, or not of the tenant ``besides``,
        back into the queue of stores. False when its readers keep its space, None when it stays."""
        with self._state.lock:
            if self._state.holds_unread(victim):
                return None
        saved = self._save(victim, besides)
        if saved is None or not self._unlink(victim):
            return None
        return self._retire(victim, saved)

    def has_pinned(self, region: Region) -> bool:
        """Return whether pages of a region, which may be gone, are pinned."""
        with self._state.lock:
            return not region.retired and self._pinned_in(region) > 0

    def _may_try(self, region: Region) -> bool:
        """Return whether a region may be tried. The caller holds the lock."""
        pause = self.stuck.get(region)
        if pause is not None and not pause.is_over:
            return False
        return not self._state.holds_unread(region)

    def remove_useless(self) -> None:
        """Give back every region in which an erasure left nothing."""
        with self._state.lock:
            regions = list(filter(_may_go, self._useless()))
        for region in regions:
            self.remove(region)

    def _useless(self) -> list[Region]:
        """Return the regions in which an erasure left nothing, the oldest first. The caller holds
        the lock."""
        state = self._state
        empty = state.regions.without(state.index.live)
        return [r for r in empty if not (r.num_foreign or state.holds_unread(r))]

    def _save(self, victim: Region, besides: bytes | None = None) -> list[StoreTicket] | None:
        """Read the pages that were loaded since they were written, as far as the credit reaches,
        and all that are pinned or not of the tenant ``besides``. A page that does not verify is
        left behind. None where pinned pages cannot be read now."""
        state = self._state
        self._credit_bytes = earned_credit(self._credit_bytes, victim.nbytes)
        if not (self._disk.accepts_stores() and self._disk.is_running):
            return None if self.has_pinned(victim) else []

        def rows(index: PageIndex) -> npt.NDArray[np.int64]:
            hot = index.hot_rows(victim.slot, int(self._credit_bytes))
            self._credit_bytes -= index.padded_bytes(hot)
            if besides is not None:
                live = index.live_rows(victim.slot)
                foreign = [tenant != besides for tenant in index.tenants_of(live)]
                hot = np.union1d(hot, live[foreign])
            return np.union1d(hot, index.pinned_rows(victim.slot))

        saved: list[StoreTicket] = []
        try:
            saved.extend(self.copies(victim, rows))
        except OSError:
            if self.has_pinned(victim):
                return None
        with state.lock:
            return None if state.holds_unread(victim) else saved

    def copies(
        self, victim: Region, rows: Callable[[PageIndex], npt.NDArray[np.int64]]
    ) -> Iterator[StoreTicket]:
        """Read these pages of a region, as much at a time as an extent holds, into memory of their
        own: stores to be reinserted. What does not verify is hidden. Raises ``OSError`` when the
        device fails."""
        groups: list[tuple[bytes, list[Wanted]]] = []
        last: dict[bytes, list[Wanted]] = {}
        sizes = Counter[bytes]()  # of the last group of each tenant
        with self._state.lock:
            index, namespace = self._state.index, self._state.namespace
            generation = self._state.generation
            found = index.in_order(rows(index))
            whose = zip(index.tenants_of(found), index.keys(found), strict=True)
            places = zip(whose, index.places(found), strict=True)
            for (tenant, key), (_, offset, length, checksum) in places:
                group, size = last.get(tenant), padded(length)
                is_full = sizes[tenant] + size > MAX_EXTENT_BYTES
                if group is None or is_full or len(group) == MAX_EXTENT_PAGES:
                    last[tenant] = group = []
                    sizes[tenant] = 0
                    groups.append((tenant, group))
                group.append(Wanted(0, key, victim, offset, length, checksum, ()))
                sizes[tenant] += size
        for tenant, group in groups:
            good = self._read(namespace, group)
            run = Run(tuple(w.key for w in good), tuple(w.page for w in good), tenant)
            job, lengths = Job(JobKind.STORE, run), [item.length for item in good]
            yield StoreTicket(job, namespace, generation, [], lengths, 0, reinserted=True)

    def _read(self, namespace: bytes, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Return the pages that verify, in memory of their own; the others are hidden. Raises
        ``OSError`` when the device fails."""
        memory = aligned_buffer(sum(padded(item.length) for item in wanted))
        placed, start = [], 0
        for item in wanted:
            end = start + padded(item.length)
            placed.append(item._replace(page=(memory[start:end],)))
            start = end
        good: list[Wanted] = []
        for span in plan_spans(placed):
            while span:
                if not self._disk.is_running:
                    raise OSError(errno.EIO, "pages that are to be moved cannot be read")
                reasons = self._reader.read(namespace, span)
                with self._state.lock:
                    num_tried = self._state.hide_failed(span, reasons)
                tried = zip(span[:num_tried], reasons[:num_tried], strict=True)
                good += [item for item, reason in tried if reason is Reason.OK]
                del span[:num_tried]
        return good

    def remove(self, region: Region) -> bool:
        """Evict a region as it is; false when its file or its readers keep its space."""
        return self._unlink(region) and self._retire(region)

    def _unlink(self, region: Region) -> bool:
        """Unlink a region's file; false when it cannot be removed, which holds up no other."""
        try:
            self._disk.unlink(region.name, region.fd)
        except OSError as error:
            self.stuck.setdefault(region, Backoff(self._disk.clock)).fail()
            self._disk.log.report(
                "remove",
                "%s cannot be removed (%s): it stays in service, its room is not given back, and "
                "it is tried again with growing pauses",
                self._disk.directory / region.name,
                error.strerror or error,
            )
            return False
        self.stuck.pop(region, None)
        if not self.stuck:
            self._disk.log.settle("remove")
        return True

    def _retire(self, region: Region, saved: Sequence[StoreTicket] = ()) -> bool:
        """Forget the keys of a region whose file is gone, but for those saved, which are on their
        way back from the same moment. I/O running on it still finishes, and is waited for, because
        the disk gets its space back only then; false when that took too long."""
        with self._state.lock:
            for ticket in reversed(saved if not self._state.closed else ()):
                self._state.reinsert(ticket, region.slot)
                if ticket.positions:
                    self._state.stores.appendleft(ticket)
            self.num_pages_evicted += self._state.index.drop_region(region.slot)
            unused = self._state.regions.retire(region)
        if unused:
            self._disk.dispose(region)
        with self._state.lock:
            return self._state.space_freed.wait_for(lambda: region.fd < 0, self._pin_timeout_s)


class CapacityState(NamedTuple):
    """What a store takes and would take. ``keeps_bytes``: it cannot come below that now.
    ``wants_bytes``: so much free room would be filled soon. ``coldest_s``: how long what goes next
    was not used."""

    capacity_bytes: int
    held_bytes: int
    keeps_bytes: int
    wants_bytes: int
    coldest_s: float
    is_shrinking: bool


class CapacityControl:
    """The capacity of a store, and the shares of it: of pins ``pin_share`` of its regions without
    two, of a tenant the part that ``max_tenant_bytes`` is of the first capacity.

    To raise it is at once. To lower it is the writer thread's work, a region at a time, in the
    order of eviction. The capacity follows what the files take, so a store never grows meanwhile.
    A region with pinned pages ends that: they would be written again for a neighbour's sake.
    """

    def __init__(
        self,
        disk: Disk,
        reclaimer: Reclaimer,
        nbytes: int,
        region_bytes: int,
        pin_share: float,
        max_tenant_bytes: int | None,
    ) -> None:
        self._disk, self._state, self._reclaimer = disk, disk.state, reclaimer
        self._region_bytes = region_bytes
        self._target_bytes = nbytes  # below the capacity while it is lowered
        self._pin_share = pin_share
        self._tenant_share = None if max_tenant_bytes is None else max_tenant_bytes / nbytes
        self._num_failures = 0
        self._stopped: tuple[int, int, float] | None = None  # capacity, pinned bytes, and when
        self._use(nbytes)

    def _use(self, nbytes: int) -> None:
        state, share = self._state, self._tenant_share
        state.capacity_bytes = nbytes
        state.max_tenant_bytes = math.inf if share is None else round(share * nbytes)
        num_regions = nbytes // self._region_bytes - 2
        state.set_pin_bound(max(int(self._pin_share * num_regions * self._region_bytes), 0))

    def set(self, nbytes: int) -> None:
        """Raise the capacity at once, or have it lowered as far as pins allow. Any thread, memory
        only."""
        with self._state.lock:
            target = max(nbytes, self._region_bytes)
            if not self.is_due or target < self._target_bytes:
                self._num_failures = 0
                self._stopped = None
            self._target_bytes = target
            if target >= self._state.capacity_bytes:
                self._use(target)
            self._state.store_ready.notify()

    def room(self) -> CapacityState:
        """Return how the store stands now. Any thread, memory only."""
        state = self._state
        with state.lock:
            held, pinned = state.regions.physical_bytes, state.index.pinned_bytes
            keeps = min(self._least(), state.capacity_bytes)
            now = self._disk.clock()
            if self._stopped is not None:
                stuck, pinned_then, since = self._stopped
                is_over = pinned != pinned_then or now - since > _STUCK_S
                keeps = keeps if is_over else max(keeps, stuck)
            is_written = now - self._reclaimer.last_made_s < _WRITING_S and not self.is_due
            wants = _WANTED_REGIONS * self._region_bytes if is_written else 0
            victim = self._reclaimer.next_victim()
            coldest_s = math.inf if victim is None else max(now - victim.used_s, 0.0)
            return CapacityState(state.capacity_bytes, held, keeps, wants, coldest_s, self.is_due)

    @property
    def is_due(self) -> bool:
        """Return whether the writer thread must make the store smaller. The caller holds the
        lock."""
        return self._target_bytes < self._state.capacity_bytes

    def _least(self) -> int:
        """Return the capacity whose bound on pins is no lower than what is pinned now."""
        pinned_bytes = self._state.index.pinned_bytes
        if not pinned_bytes or not self._pin_share:
            return self._region_bytes
        regions = math.ceil(pinned_bytes / self._pin_share / self._region_bytes)
        return (regions + 2) * self._region_bytes

    def step(self) -> None:
        """Remove one region, or end where nothing more may go. The writer thread."""
        state = self._state
        with state.lock:
            limit = max(self._target_bytes, self._least())
            held, victim = state.regions.physical_bytes, None
            if held > limit:
                victim = self._reclaimer.next_victim()
                if victim is not None and state.index.pinned_in(victim.slot):
                    victim = None
        may_go = victim is not None and self._disk.is_ours() and self._disk.accepts_stores()
        if victim is not None and may_go and not self._reclaimer.evict(victim):
            self._num_failures += 1  # its file or its readers keep it
            may_go = self._num_failures < _MAX_VICTIMS
        with state.lock:
            held = state.regions.physical_bytes
            # Pins that came during the eviction were allowed by the bound of before.
            limit = max(limit, self._least())
            if not may_go:
                # With pins a region stays free, so that theirs are written again before they go.
                spare = self._region_bytes if len(state.pins) else 0
                limit = max(limit, held + spare if held > limit else limit)
                stopped_at = min(limit, state.capacity_bytes)
                if limit > self._target_bytes:
                    self._stopped = stopped_at, state.index.pinned_bytes, self._disk.clock()
                self._target_bytes = stopped_at
            self._use(min(state.capacity_bytes, max(limit, held)))
