"""The erase table: what is selected x where its pages are x when the server dies. Whatever the row,
they are hidden at once, and once the answer was true nothing brings one back."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from erasing_servers import Servers
from peer_servers import end_links
from simulation.device import CrashMode, SimulatedDevice
from simulation.engine import running
from simulation.ledger import TIMEOUT_S, held, keys, store, submit

from kit.faulty import Fault, FaultyDevice
from kit.request_hooks import before
from kit.runs import NAMESPACE
from kit.waiting import drained, eventually
from sglang_tiered.storage.base import Erasure, PinRefusal, Reason, Tier
from sglang_tiered.storage.bucket.requests import BucketError, Failure
from sglang_tiered.storage.promises import all_true, is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.stack import TierStack

pytestmark = pytest.mark.timeout(120)

A, B = b"a" * 16, b"b" * 16
GONE, STAYS, LATER = keys(range(8)), keys(range(100, 108)), keys(range(200, 204))
C = b"c" * 16
SELECTORS = {
    "pages": Erasure.of([*GONE, *LATER]),
    "tenant": Erasure(tenant=A),
    "everything": Erasure(),
}
MODES: tuple[CrashMode, ...] = ("kill", "drop", "torn", "reorder")
CRASHES = (*((mode, 0) for mode in MODES), ("reorder", 1))

erases = pytest.mark.parametrize("what", SELECTORS.values(), ids=SELECTORS)


def fill(engine: RegionEngine) -> None:
    for start in range(0, 8, 4):
        assert store(engine, GONE[start : start + 4], A) == [Reason.OK] * 4
        assert store(engine, STAYS[start : start + 4], B) == [Reason.OK] * 4
    assert engine.flush(TIMEOUT_S)


# ---- NVMe ----


class Disk(FaultyDevice):
    """Holds writes back, or says of one that it failed though it did not."""

    def __init__(self, inner: SimulatedDevice) -> None:
        super().__init__(inner, before=self._wait)
        self.holds = self.lies = False
        self.held, self.go_on = threading.Event(), threading.Event()

    def _wait(self, operation: str) -> None:
        if self.holds and operation == "writev":
            self.held.set()
            assert self.go_on.wait(TIMEOUT_S)

    def writev(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        written = super().writev(fd, segments, offset)
        if self.lies:
            raise OSError(errno.EIO, "it is there all the same")
        return written

    def release(self) -> None:
        self.holds = False
        self.go_on.set()


def synced(engine: RegionEngine, disk: Disk) -> None:
    fill(engine)


def unsynced(engine: RegionEngine, disk: Disk) -> None:
    fill(engine)
    assert store(engine, LATER, A) == [Reason.OK] * 4


def on_its_way(engine: RegionEngine, disk: Disk) -> None:
    """One store is being written, the next has no place yet."""
    fill(engine)
    disk.holds = True
    submit(engine, LATER[:2], A)
    assert disk.held.wait(TIMEOUT_S)
    submit(engine, LATER[2:], A)


def behind_a_failed_write(engine: RegionEngine, disk: Disk) -> None:
    """Its bytes are on the disk, where the log goes on."""
    fill(engine)
    disk.lies = True
    assert store(engine, LATER[:1], A) == [Reason.IO_ERROR]
    disk.lies = False


def pinned(engine: RegionEngine, disk: Disk) -> None:
    fill(engine)
    made = engine.pin("p", GONE, A)
    assert not isinstance(made, PinRefusal)
    assert is_true(made, TIMEOUT_S)


PLACES = [
    *((place, False) for place in (synced, unsynced, on_its_way, behind_a_failed_write, pinned)),
    *((place, True) for place in (synced, on_its_way)),  # a later process may serve it again
]


@erases
@pytest.mark.parametrize(("place", "is_in_another_namespace"), PLACES)
@pytest.mark.parametrize("mode", ["close", "kill", "drop", "reorder"])
def test_nothing_erased_comes_back(
    tmp_path: Path,
    what: Erasure,
    place: Callable[[RegionEngine, Disk], None],
    is_in_another_namespace: bool,
    mode: Any,
) -> None:
    device = SimulatedDevice()
    disk = Disk(device)
    with running(tmp_path, disk) as engine:
        place(engine, disk)
        if is_in_another_namespace:
            engine.set_namespace(b"\x77" * 32)
        durable = engine.erase(what)
        assert not any(engine.contains([*GONE, *LATER])), "hidden at once"
        disk.release()
        assert is_true(durable, TIMEOUT_S)
        assert not any(engine.contains([*GONE, *LATER]))
        assert not engine.pins()
        assert drained(engine, TIMEOUT_S)
        engine.check_integrity()
        files = device.crash(mode) if mode != "close" else None
        device.powered = device.powered and files is None
    device = device.restart() if files is None else SimulatedDevice(files)
    with running(tmp_path, device) as engine:
        assert held(engine, [*GONE, *LATER]) == 0
        assert held(engine, STAYS) == (0 if what.is_everything else 8)
        assert not engine.pins()
        assert store(engine, [*GONE, *LATER], A) == [Reason.OK] * 12
    with running(tmp_path, device.restart()) as engine:
        assert held(engine, [*GONE, *LATER]) == 12, "what is stored since counts"


@erases
@pytest.mark.parametrize(
    "operations",
    [["unlink"], ["replace_file"], ["sync_directory"], ["sync", "replace_file"]],
    ids="-".join,
)
def test_true_waits_for_what_failed_before(
    tmp_path: Path, what: Erasure, operations: list[Any]
) -> None:
    """At every repetition, and where something else is erased."""
    inner = SimulatedDevice()
    disk = Disk(inner)
    with running(tmp_path, disk) as engine:
        pinned(engine, disk)
        if "sync" in operations:  # what is there already is appended to
            assert is_true(engine.erase(Erasure(tenant=C)), TIMEOUT_S)
        disk.faults = [Fault(0, each, times=1 << 30, error=errno.EIO) for each in operations]
        for each in (what, what, Erasure(tenant=C)):
            assert not is_true(engine.erase(each), TIMEOUT_S)
            assert held(engine, GONE) == 0, "not durable, but hidden"
        disk.faults = []
        assert is_true(engine.erase(Erasure(tenant=C)), TIMEOUT_S)
        files = inner.crash("drop")
    with running(tmp_path, SimulatedDevice(files)) as engine:
        assert not engine.pins()
        assert held(engine, GONE) == 0
        assert held(engine, STAYS) == (0 if what.is_everything else 8)


@erases
@pytest.mark.parametrize("operation", ["open", "writev", "sync"])
def test_a_failed_append_leaves_no_doubt(tmp_path: Path, what: Erasure, operation: Any) -> None:
    """After a failed sync the next one may say that all is well, and lie."""
    inner = SimulatedDevice()
    disk = Disk(inner)
    with running(tmp_path, disk) as engine:
        fill(engine)
        assert is_true(engine.erase(Erasure(tenant=C)), TIMEOUT_S)
        if operation == "sync":
            inner.lossy_syncs = 1
        else:
            disk.faults = [Fault(0, operation, times=1 << 30, error=errno.EIO)]
        assert is_true(engine.erase(what), TIMEOUT_S)
        disk.faults = []
        assert is_true(engine.erase(Erasure(tenant=b"d" * 16)), TIMEOUT_S)
        files = inner.crash("drop")
    with running(tmp_path, SimulatedDevice(files)) as engine:
        assert held(engine, GONE) == 0
        assert held(engine, STAYS) == (0 if what.is_everything else 8)


def erase_amid_stores(engine: RegionEngine, what: Erasure, told: list[str]) -> None:
    """``told`` is what the caller knows: that it began, and that it is durable."""
    fill(engine)
    jobs = [submit(engine, LATER[:2], A), submit(engine, keys(range(300, 303)), B)]
    told.append("begun")
    if is_true(engine.erase(what), TIMEOUT_S):
        told.append("durable")
    for job in jobs:
        assert job.wait(TIMEOUT_S)
    if "durable" in told and store(engine, LATER[2:], A) == [Reason.OK] * 2:
        told.append("again")
        if engine.flush(TIMEOUT_S):
            told.append("synced")


@erases
def test_power_may_fail_anywhere_while_erasing(tmp_path: Path, what: Erasure) -> None:
    at = num_begun = num_durable = 0
    while True:
        device, told = SimulatedDevice(power_off_at=at), list[str]()
        with running(tmp_path, device) as engine:
            if device.powered:
                try:
                    erase_amid_stores(engine, what, told)
                except AssertionError:
                    assert not device.powered, "erasing fails on a disk that works"
        assert not device.misuse, device.misuse
        num_begun += "begun" in told and not device.powered
        num_durable += "durable" in told and not device.powered
        for mode, seed in CRASHES if told else ():
            with running(tmp_path, SimulatedDevice(device.crash(mode, seed))) as engine:
                where = f"change {at}, {mode}, seed {seed}, {told}"
                if not what.is_everything:
                    assert held(engine, STAYS) == 8, where
                if "durable" in told:
                    assert held(engine, [*GONE, *LATER[:2]]) == 0, where
                    since = held(engine, LATER[2:])
                    owed = "synced" in told or ("again" in told and mode == "kill")
                    assert since == 2 if owed else since <= 2, where
                # And what a recovery makes of it stays so.
                assert store(engine, keys(range(400, 403)), A) == [Reason.OK] * 3
                assert engine.flush(TIMEOUT_S)
        if device.powered:
            break
        at += 1
    assert num_begun > 3, "the power never went while pages were being erased"
    assert num_durable > 3, "the power never went behind it"


MANY = {
    "pages": [Erasure.of(keys(range(1000, 1000 + (1 << 18)))), Erasure.of(GONE[:1])],
    "tenants": [*(Erasure(tenant=n.to_bytes(16, "little")) for n in range(1, (1 << 14) + 2))],
}


@pytest.mark.parametrize("whats", MANY.values(), ids=MANY)
def test_many_erasures_cost_others_nothing(tmp_path: Path, whats: list[Erasure]) -> None:
    """Not what each writes, nor pages that none of them names, pinned or not."""
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        pinned(engine, Disk(device))
        for start in range(0, len(whats) - 1, 256):
            last = [engine.erase(what) for what in whats[start:-1][:256]][-1]
            assert is_true(last, TIMEOUT_S)
        before = engine.stats().bytes_written
        assert is_true(engine.erase(whats[-1]), TIMEOUT_S)
        assert engine.stats().bytes_written - before <= 1 << 14
        files = device.crash("drop")
        gone = len(whats[-1].keys or ())
        expected = 8 - gone, 8, [8 - gone]
    with running(tmp_path, SimulatedDevice(files)) as engine:
        assert held(engine, GONE) == expected[0]
        assert held(engine, STAYS) == expected[1]
        assert [pin.num_pages for pin in engine.pins()] == expected[2]


# ---- A bucket, and the servers that share it ----


def sharing(*tiers: Tier) -> Any:
    """A fixture: servers that share these tiers."""

    @pytest.fixture
    def servers(tmp_path: Path) -> Iterator[Servers]:
        with ExitStack() as opened:
            yield Servers(tmp_path, opened, *tiers)

    return servers


servers, peers, both = sharing(Tier.OBJECT), sharing(Tier.PEER), sharing(Tier.PEER, Tier.OBJECT)


def look(stack: TierStack) -> None:
    assert stack.bucket is not None
    assert stack.bucket.refresh(TIMEOUT_S)


def copied_down(stack: TierStack, wanted: Sequence[bytes]) -> bool:
    look(stack)
    return all(stack.contains_in_bucket(wanted))


@erases
@pytest.mark.parametrize("other_is", ["up", "down"])
def test_an_erasure_reaches_every_server_of_a_bucket(
    servers: Servers, what: Erasure, other_is: str
) -> None:
    """No two clocks are compared."""
    one, other = servers.open("one", behind_s=300.0), servers.open("other")
    for stack in (one, other):
        assert store(stack, GONE, A) == [Reason.OK] * 8
        assert store(stack, STAYS, B) == [Reason.OK] * 8
        eventually(lambda stack=stack: copied_down(stack, [*GONE, *STAYS]))
    if other_is == "down":
        assert other.flush(TIMEOUT_S)
        other.close()
    assert is_true(one.erase(what), TIMEOUT_S)
    if other_is == "down":
        other = servers.open("other")
    look(other)
    eventually(lambda: not any(other.nvme.contains(GONE)), "its NVMe keeps them")
    assert not any(other.contains(GONE))
    assert all(other.nvme.contains(STAYS)) != what.is_everything
    # And its next start brings none of them back.
    assert store(other, LATER, B) == [Reason.OK] * 4
    assert other.flush(TIMEOUT_S)
    other.close()
    other = servers.open("other")
    eventually(lambda: copied_down(other, LATER))
    look(one)
    assert not any(one.contains(GONE))
    assert other.nvme.contains(LATER) == [True] * 4, "what it stored since is erased again"


@erases
@pytest.mark.parametrize("other_is", ["up", "new"])
def test_what_is_stored_again_stays_for_all(servers: Servers, what: Erasure, other_is: str) -> None:
    """However a server comes to know that it was erased before."""
    one = servers.open("one")
    assert store(one, GONE, A) == [Reason.OK] * 8
    eventually(lambda: copied_down(one, GONE))
    if other_is == "up":
        other = servers.open("other")
        assert copied_down(other, GONE)
    assert is_true(one.erase(what), TIMEOUT_S)
    assert store(one, GONE, A) == [Reason.OK] * 8
    assert all(one.flush_to_bucket(GONE, TIMEOUT_S))
    for number in range(2):
        assert is_true(one.erase(Erasure(tenant=bytes([number]) * 16)), TIMEOUT_S)
    if other_is == "new":
        other = servers.open("other")
    for stack in (other, one, other):
        assert stack.bucket is not None
        assert stack.bucket.refresh(TIMEOUT_S, full=True)
    assert all(other.contains(GONE)), "hidden as if it were from before"
    assert all(one.contains_in_bucket(GONE)), "deleted for all"


@erases
def test_ranks_of_one_server_tell_each_other_nothing(servers: Servers, what: Erasure) -> None:
    """Each erases for itself, by the same id: what is computed meanwhile stays."""
    ranks = [servers.open(f"rank-{n}", namespace=bytes([n]) * 32) for n in range(1, 4)]
    assert is_true(all_true([rank.erase(what) for rank in ranks]), TIMEOUT_S)
    for rank in ranks:
        look(rank)
    assert not servers.told


@erases
def test_a_refused_tombstone_stops_no_discovery(servers: Servers, what: Erasure) -> None:
    one, other = servers.open("one"), servers.open("other")
    assert one.bucket is not None

    def refuse() -> None:
        raise BucketError(Failure.DENIED, "no")

    before(one.bucket, "put", refuse, "/erased/", times=2)
    for _ in range(2):
        assert not is_true(one.erase(what), TIMEOUT_S)
    assert store(other, STAYS, B) == [Reason.OK] * 8
    eventually(lambda: copied_down(other, STAYS))
    look(one)
    if not what.is_everything:  # which means what is stored before the tombstone is there, too
        assert all(one.contains(STAYS)), "nothing is found any more"


@erases
def test_an_erasure_outlives_a_change_of_namespace(servers: Servers, what: Erasure) -> None:
    """As when the weights are replaced, and put back."""
    one, other = servers.open("one"), servers.open("other")
    assert store(one, GONE, A) == [Reason.OK] * 8
    eventually(lambda: copied_down(one, GONE))
    assert copied_down(other, GONE)
    assert is_true(one.erase(what), TIMEOUT_S)
    look(other)
    for namespace in (b"\x77" * 32, NAMESPACE):
        assert other.bucket is not None
        other.bucket.set_namespace(namespace)
        look(other)
    state: Any = other.bucket._state  # type: ignore[attr-defined]
    with state.lock:
        assert state.erased.kills(NAMESPACE, A, GONE[0], 0), "a page of before counts again"


# ---- Servers that follow each other ----


@erases
@pytest.mark.parametrize("other_is", ["up", "down", "away", "both restarted"])
def test_an_erasure_reaches_a_peer_before_pages(
    peers: Servers, what: Erasure, other_is: str
) -> None:
    one, other = peers.open("one"), peers.open("other")
    assert store(one, [*GONE, *STAYS[:4]], B if what.tenant else A) == [Reason.OK] * 12
    assert store(other, GONE, A) == [Reason.OK] * 8
    assert store(other, STAYS, B) == [Reason.OK] * 8
    peers.connect()
    beyond = Tier.PEER
    eventually(lambda: all(one.remote[beyond].contains(STAYS[4:])), "they do not share")
    if other_is == "down":
        assert other.flush(TIMEOUT_S)
        other.close()
    elif other_is == "away":
        peers.cut()
        for stack in (one, other):  # else they follow each other for as long as both answer
            end_links(stack.remote[beyond]._sync)  # type: ignore[attr-defined]
        eventually(lambda: one.remote[beyond].stats().num_peers == 0)  # type: ignore[attr-defined]
    assert is_true(one.erase(what), TIMEOUT_S)
    if other_is == "both restarted":
        for stack in (one, other):
            assert stack.flush(TIMEOUT_S)
            stack.close()
        one, other = peers.open("one"), peers.open("other")
    elif other_is == "down":
        other = peers.open("other")
    peers.connect()
    # It hears of the erasure in between, if that means these pages too.
    assert set(store(other, LATER, B)) <= {Reason.OK, Reason.CANCELLED}
    if other_is in ("up", "both restarted"):
        assert not any(other.nvme.contains(GONE)), "true before it was done"
    eventually(lambda: not any(other.nvme.contains(GONE)), "its NVMe keeps them")
    if not what.is_everything:
        assert all(other.nvme.contains(STAYS)), "others' pages went too"
        eventually(lambda: all(one.remote[beyond].contains(STAYS[4:])), "no page is taken again")
    assert not any(one.remote[beyond].contains(GONE))
    if what.tenant is None:
        assert not any(other.contains(GONE))
    # And its next start erases nothing again.
    assert store(other, GONE[:4], B) == [Reason.OK] * 4
    assert other.flush(TIMEOUT_S)
    other.close()
    other = peers.open("other")
    eventually(lambda: other.remote[beyond].stats().num_peers == 1)  # type: ignore[attr-defined]
    assert other.nvme.contains(GONE[:4]) == [True] * 4


# ---- Both: what a peer tells, the bucket tells too, in any order ----

CROSSED = SELECTORS | {"pages": Erasure.of([*keys(range(1000, 2024)), *GONE])}  # two pieces


def hear(other: TierStack, one: TierStack, by: str, both: Servers) -> None:
    """Have ``other`` hear what ``one`` erased: a piece of it alone, or all."""
    peer: Any = other.remote[Tier.PEER]
    if by == "bucket":
        look(other)
    elif by == "peers":
        both.connect()
        eventually(lambda: (f := peer.stats()).num_peers == 1 and not f.num_peers_withheld)
    else:
        known: Any = one.remote[Tier.PEER]
        peer._sync.taught(known._sync.book.compare(b"")[1][:1])
        eventually(lambda: peer.stats().num_purges_applied == 1)


@pytest.mark.parametrize("what", CROSSED.values(), ids=CROSSED)
@pytest.mark.parametrize(
    "told_by", ["bucket-peers", "peers-bucket", "piece-bucket-peers", "piece-peers-bucket"]
)
def test_told_twice_it_is_erased_once(both: Servers, what: Erasure, told_by: str) -> None:
    """What anybody stores since stays: on NVMe, and in the bucket for servers that start later."""
    one, other = both.open("one"), both.open("other")
    for stack in (one, other):
        assert store(stack, GONE, A) == [Reason.OK] * 8
        eventually(lambda stack=stack: copied_down(stack, GONE))
    assert is_true(one.erase(what), TIMEOUT_S)
    first, *later = told_by.split("-")
    hear(other, one, first, both)
    if first == "piece" and what.keys:
        assert all(other.nvme.contains(GONE)), "it was told of others so far"
        hear(other, one, later.pop(0), both)
    eventually(lambda: not any(other.nvme.contains(GONE)), "its NVMe keeps them")
    assert not any(other.contains(GONE))
    assert store(one, GONE[4:], A) == [Reason.OK] * 4
    eventually(lambda: copied_down(one, GONE[4:]))
    assert store(other, GONE[:4], A) == [Reason.OK] * 4
    for by in later:
        hear(other, one, by, both)
    assert all(other.nvme.contains(GONE[:4])), "it is erased again"
    assert is_true(one.erase(Erasure(tenant=C)), TIMEOUT_S)
    both.open("third")  # it hears of all that was ever erased
    for stack in (other, both.open("fourth"), one):
        assert stack.bucket is not None
        assert stack.bucket.refresh(TIMEOUT_S, full=True)
        assert all(stack.contains_in_bucket(GONE[4:])), "what was stored since is gone"


def test_nobody_else_erases_what_has_no_id(both: Servers) -> None:
    one, other = both.open("one"), both.open("other")
    assert store(one, GONE, A) == [Reason.OK] * 8
    eventually(lambda: copied_down(one, GONE))
    assert is_true(one.erase(Erasure(id=b"", spread=False)), TIMEOUT_S)
    assert not any(one.nvme.contains(GONE))
    for stack in (one, other):
        look(stack)
        assert all(stack.contains_in_bucket(GONE))
