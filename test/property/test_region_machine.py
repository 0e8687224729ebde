"""The region engine against a dict, under restarts, crashes, losses of power, damage and eviction.

It may forget a page that was evicted, unless it is pinned, or damaged, or that a loss of power took
before a barrier. It must never return other bytes; what it acknowledged is there after a crash, and
what it acknowledged before a barrier is there after a loss of power. Regions are small, so reclaim
runs all the time. The same machine runs on the simulated disk and, without losses of power, on a
real directory.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from simulation import ledger
from simulation.device import CrashMode, SimulatedDevice
from simulation.engine import small_steps
from simulation.ledger import TENANTS, key, tenant_of

from kit.faulty import Fault, FaultyDevice
from kit.runs import soft_encoding
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.storage.base import (
    NO_TENANT,
    Erasure,
    Health,
    Job,
    PinRefusal,
    Reason,
    Run,
    Stop,
)
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.format import BLOCK_BYTES, padded, parse_region_name

REGION = 48 * 1024
NUM_REGIONS = 4
NAMESPACES = (b"\x11" * 32, b"\x11" * 31 + b"\x22")
KEYS = [key(number) for number in range(24)]
SERVED = {Reason.OK, Reason.DUPLICATE}

content = partial(ledger.content, sizes=(1, 100, 4096, 5000, 8192, 12_288))
chains = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True)
power_losses: st.SearchStrategy[CrashMode] = st.sampled_from(["drop", "torn", "reorder"])


def by_tenant(chosen: Sequence[bytes]) -> list[list[bytes]]:
    runs = ([key for key in chosen if tenant_of(key) == tenant] for tenant in TENANTS)
    return [run for run in runs if run]


def flip(device: FileDevice, name: str, bit: int) -> None:
    """Damage one bit of one block, behind the engine's back."""
    fd = device.open(name)
    block = memoryview(bytearray(BLOCK_BYTES))
    offset = bit // 8 % REGION // BLOCK_BYTES * BLOCK_BYTES
    if device.readv(fd, [block], offset) == BLOCK_BYTES:
        block[bit // 8 % BLOCK_BYTES] ^= 1 << bit % 8
        device.writev(fd, [block], offset)
    device.close(fd)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.small_steps = small_steps()
        self.small_steps.__enter__()
        self.directory = Path(tempfile.mkdtemp(prefix="region-machine-"))
        self.device = self.make_device()
        self.namespace = NAMESPACES[0]
        # Keys that must be found: acknowledged, and neither evicted nor damaged since; and those of
        # them that a barrier has seen since.
        self.certain: dict[bytes, set[bytes]] = {namespace: set() for namespace in NAMESPACES}
        self.durable: dict[bytes, set[bytes]] = {namespace: set() for namespace in NAMESPACES}
        self.harmed = False  # something on the disk may be damaged
        self.open_region_harmed = False
        # Of these tenants nothing may be found but what was stored since; by namespace, as the
        # keys that may.
        self.purged: dict[bytes, dict[bytes, set[bytes]]] = {}
        # These pages were forgotten, and stored again since under these namespaces.
        self.gone: dict[bytes, set[bytes]] = {}
        self.pins: dict[str, tuple[bytes, set[bytes], float | None]] = {}  # tenant, keys, until
        self.now = 1000.0
        self.codecs = itertools.cycle(("zstd", "none"))  # of one start and the next
        self.engine = self.open()

    def make_device(self) -> Any:
        raise NotImplementedError

    def crash(self) -> None:
        """Go on with what a dead process leaves; the engine of the old one is put away."""
        raise NotImplementedError

    def open(self) -> RegionEngine:
        self.open_region_harmed = False  # recovery sealed it as it is
        self.told: tuple[int, list[int]] = (0, [])  # a version, and fingerprints
        return RegionEngine(
            self.directory,
            namespace=self.namespace,
            capacity_bytes=NUM_REGIONS * REGION,
            region_bytes=REGION,
            num_threads=3,
            sync_interval_s=3600.0,
            encoding=soft_encoding(next(self.codecs)),
            device=self.device,
            wall_clock=lambda: self.now,
        )

    def run(self, chosen: Sequence[bytes], *, blank: bool) -> Run:
        data = [content(self.namespace, key) for key in chosen]
        pages = [bytearray(b"\xa5" * len(d)) if blank else bytearray(d) for d in data]
        tenant = NO_TENANT if blank else tenant_of(chosen[0])
        return Run(tuple(chosen), tuple((memoryview(page),) for page in pages), tenant)

    def regions(self) -> list[str]:
        names = self.device.list_names()
        return sorted(name for name in names if parse_region_name(name) is not None)

    def forget_certainty(self) -> None:
        for namespace in NAMESPACES:
            self.certain[namespace].clear()
            self.durable[namespace].clear()

    @contextlib.contextmanager
    def forgetting_what_is_evicted(self) -> Iterator[None]:
        """Regions that were there before and go, of whichever namespace; or that come and go."""
        regions, num_evicted = set(self.regions()), self.engine.stats().num_pages_evicted
        yield
        evicted = self.engine.stats().num_pages_evicted > num_evicted
        if evicted or regions - set(self.regions()):
            kept = self.certain[self.namespace] & self.kept()
            self.forget_certainty()
            self.certain[self.namespace] = kept

    def kept(self) -> set[bytes]:
        """Pages that reclaim must keep: all that pins name, if all of them fit."""
        wanted = set[bytes]().union(*(keys for _, keys, _ in self.pins.values()))
        nbytes = sum(padded(len(content(self.namespace, key))) for key in wanted)
        return wanted if nbytes <= self.engine.pin_bound_bytes else set()

    def count_as_certain(self, *runs: Sequence[bytes]) -> None:
        # Damage in the open region may hide from a recovery what is appended behind it.
        if not self.open_region_harmed:
            self.certain[self.namespace].update(*runs)

    def may_be_found(self, *runs: Sequence[bytes]) -> None:
        for each in itertools.chain(*runs):
            if tenant_of(each) in self.purged:
                self.purged[tenant_of(each)].setdefault(self.namespace, set()).add(each)
            if each in self.gone:
                self.gone[each].add(self.namespace)

    def all_is_durable(self) -> None:
        self.durable = {namespace: set(keys) for namespace, keys in self.certain.items()}

    @rule(runs=st.lists(chains, min_size=1, max_size=4))
    def store(self, runs: list[list[bytes]]) -> None:
        """Several at once, so that the writer may group them."""
        with self.forgetting_what_is_evicted():
            parts = [part for chosen in runs for part in by_tenant(chosen)]
            self.may_be_found(*parts)
            jobs = [self.engine.submit_store(self.run(part, blank=False)) for part in parts]
            for job in jobs:
                assert set(finished(job)) <= SERVED, job.reasons
            self.count_as_certain(*runs)

    @rule(chosen=chains, wanted=chains)
    def cancel(self, chosen: list[bytes], wanted: list[bytes]) -> None:
        with self.forgetting_what_is_evicted():
            chosen = by_tenant(chosen)[0]
            self.may_be_found(chosen)
            store = self.engine.submit_store(self.run(chosen, blank=False))
            load = self.engine.submit_load(self.run(wanted, blank=True))
            store.cancel()
            load.cancel()
            assert set(finished(store)) <= SERVED | {Reason.CANCELLED}
            self.check_loaded(load, {Reason.MISS, Reason.CANCELLED})
            self.count_as_certain(
                [key for key, reason in zip(chosen, store.reasons, strict=True) if reason in SERVED]
            )

    @rule(chosen=chains)
    def load(self, chosen: list[bytes]) -> None:
        self.check_loaded(self.engine.submit_load(self.run(chosen, blank=True)), set())

    def check_loaded(self, job: Job, excuses: set[Reason]) -> None:
        allowed = {Reason.OK, Reason.MISS} | ({Reason.CORRUPT} if self.harmed else set())
        for each, page, reason in zip(job.run.keys, job.run.pages, finished(job), strict=True):
            assert reason in allowed | excuses
            if reason is Reason.OK:
                assert bytes(page[0]) == content(self.namespace, each), "wrong bytes"
            elif reason not in excuses:
                assert each not in self.certain[self.namespace], f"{each[:2].hex()} was lost"

    @rule(chosen=chains)
    def lookup(self, chosen: list[bytes]) -> None:
        num_hits, stop = self.engine.lookup(chosen)
        certain = [key in self.certain[self.namespace] for key in chosen]
        assert num_hits >= [*certain, False].index(False)
        assert stop is (Stop.END if num_hits == len(chosen) else Stop.MISS)

    @rule()
    def sync(self) -> None:
        assert self.engine.flush(TIMEOUT_S), "a barrier fails on a working device"
        self.all_is_durable()

    @rule(tenant=st.sampled_from(TENANTS), stored=chains)
    def purge(self, tenant: bytes, stored: list[bytes]) -> None:
        """With stores of every tenant under way."""
        self.erase(
            Erasure(tenant=tenant), {key for key in KEYS if tenant_of(key) == tenant}, stored
        )
        self.pins = {name: pin for name, pin in self.pins.items() if pin[0] != tenant}

    @rule(chosen=chains, stored=chains)
    def forget(self, chosen: list[bytes], stored: list[bytes]) -> None:
        """With stores of the same and of other pages under way."""
        self.erase(Erasure.of(chosen), set(chosen), stored)
        kept = {n: (tenant, keys - set(chosen), at) for n, (tenant, keys, at) in self.pins.items()}
        self.pins = {name: pin for name, pin in kept.items() if pin[1]}

    def erase(self, what: Erasure, gone: set[bytes], stored: list[bytes]) -> None:
        with self.forgetting_what_is_evicted():
            parts = by_tenant(stored)
            self.may_be_found(*parts)
            jobs = [self.engine.submit_store(self.run(part, blank=False)) for part in parts]
            assert is_true(self.engine.erase(what), TIMEOUT_S), "it fails on a working device"
            if what.keys is None:
                self.purged[what.tenant] = {}
            for part, job in zip(parts, jobs, strict=True):
                excuse = {Reason.CANCELLED} if gone & set(part) or what.keys else set()
                assert set(finished(job)) <= SERVED | excuse, job.reasons
                self.count_as_certain(
                    [key for key, reason in zip(part, job.reasons, strict=True) if reason in SERVED]
                )
            for keys in (*self.certain.values(), *self.durable.values()):
                keys.difference_update(gone)
            if what.keys is not None:
                self.gone.update((key, set()) for key in gone)

    @rule(
        name=st.sampled_from("xyz"),
        chosen=chains,
        tenant=st.sampled_from(TENANTS),
        lasts_s=st.sampled_from([None, 50.0, 150.0]),
    )
    def pin(self, name: str, chosen: list[bytes], tenant: bytes, lasts_s: float | None) -> None:
        until = None if lasts_s is None else self.now + lasts_s
        with self.forgetting_what_is_evicted():
            made = self.engine.pin(name, chosen, tenant, until)
            if isinstance(made, PinRefusal):
                assert made.asked_bytes + made.pinned_bytes > made.bound_bytes
                return
            assert is_true(made, TIMEOUT_S), "a pin fails on a working device"
            self.pins[name] = tenant, set(chosen), until

    @rule(name=st.sampled_from("xyz"))
    def unpin(self, name: str) -> None:
        assert is_true(self.engine.unpin(name), TIMEOUT_S)
        self.pins.pop(name, None)

    @rule()
    def expire(self) -> None:
        self.now += 100.0
        self.pins = {
            name: pin for name, pin in self.pins.items() if pin[2] is None or pin[2] > self.now
        }

    @rule()
    def clear(self) -> None:
        assert is_true(self.engine.erase(Erasure()), TIMEOUT_S), "it fails on a working device"
        self.forget_certainty()
        self.purged = {tenant: {} for tenant in TENANTS}
        self.pins = {}
        assert self.engine.stats().physical_bytes == 0
        assert self.engine.stats().num_pages == 0
        assert not self.regions()
        self.harmed = False

    @rule(namespace=st.sampled_from(NAMESPACES))
    def reopen(self, namespace: bytes) -> None:
        self.engine.close()
        self.all_is_durable()
        self.namespace = namespace
        self.engine = self.open()

    @rule()
    def kill(self) -> None:
        self.crash()
        self.engine = self.open()

    @rule(namespace=st.sampled_from(NAMESPACES))
    def set_namespace(self, namespace: bytes) -> None:
        self.engine.set_namespace(namespace)
        self.namespace = namespace
        # In memory the index starts empty; the bytes are found again after a restart, but which
        # of two copies of a page survives later evictions is beyond this model.
        self.forget_certainty()

    @rule(bit=st.integers(0, REGION * 8 - 1), which=st.integers(0, 99))
    def corrupt(self, bit: int, which: int) -> None:
        # Whether a cancelled store made a region is a matter of luck: no precondition says so.
        if regions := self.regions():
            flip(self.device, regions[which % len(regions)], bit)
            self.forget_certainty()
            self.harmed = self.open_region_harmed = True

    @invariant()
    def purged_pages_stay_away(self) -> None:
        for tenant, since in self.purged.items():
            for each in KEYS:
                if tenant_of(each) == tenant and each not in since.get(self.namespace, set()):
                    assert self.engine.lookup([each]).num_hits == 0, "a purged page came back"

    @invariant()
    def forgotten_pages_stay_away(self) -> None:
        for each, since in self.gone.items():
            if self.namespace not in since:
                assert self.engine.lookup([each]).num_hits == 0, "a forgotten page came back"

    @invariant()
    def pins_are_what_was_asked(self) -> None:
        infos = {
            each.name: (each.tenant, each.num_pages, each.until_s) for each in self.engine.pins()
        }
        assert infos == {
            name: (tenant, sum(self.engine.contains(sorted(keys))), until)
            for name, (tenant, keys, until) in self.pins.items()
        }

    @invariant()
    def fingerprints_are_told(self) -> None:
        """Of all that is held, and anew only when that has changed."""
        held: list[bool] = []

        def is_settled() -> bool:  # what reclaim saved may be on its way back
            held[:] = self.engine.contains(KEYS)
            told = self.engine.view.fingerprints(self.told[0])
            if told is not None:
                assert told[0] not in (0, self.told[0])
                self.told = told[0], sorted(told[1].tolist())
            return told is None and held == self.engine.contains(KEYS)

        if not (is_settled() or is_settled()):
            eventually(is_settled, "fingerprints change without end")
        keys = itertools.compress(KEYS, held)
        assert self.told[1] == sorted(int.from_bytes(each[:8], "little") for each in keys)

    @invariant()
    def books_balance(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.health is Health.RUNNING
        assert stats.num_inflight_jobs == 0
        assert stats.queued_store_bytes == 0
        assert stats.num_pages >= len(self.certain[self.namespace])

    def teardown(self) -> None:
        self.engine.close()
        self.small_steps.__exit__(None, None, None)
        shutil.rmtree(self.directory)


class RegionMachine(StoreMachine):
    """On the simulated disk, whose power can be cut."""

    def make_device(self) -> SimulatedDevice:
        return SimulatedDevice()

    def crash(self) -> None:
        old, self.device = self.device, self.device.restart()
        self.engine.close()
        assert not old.misuse, old.misuse

    @rule(mode=power_losses, seed=st.integers(0, 999), chosen=chains)
    def lose_power_after_forgetting(self, mode: CrashMode, seed: int, chosen: list[bytes]) -> None:
        self.forget(chosen, KEYS[:2])
        self.lose_power(mode, seed)

    @rule(mode=power_losses, seed=st.integers(0, 999), tenant=st.sampled_from(TENANTS))
    def lose_power_after_a_purge(self, mode: CrashMode, seed: int, tenant: bytes) -> None:
        self.purge(tenant, KEYS[:1])
        self.lose_power(mode, seed)

    @rule(mode=power_losses, seed=st.integers(0, 999))
    def lose_power_now(self, mode: CrashMode, seed: int) -> None:
        self.lose_power(mode, seed)

    def lose_power(self, mode: CrashMode, seed: int) -> None:
        self.device.powered = False
        self.engine.close()
        assert not self.device.misuse, self.device.misuse
        self.device = SimulatedDevice(self.device.crash(mode, seed))
        self.certain = {namespace: set(keys) for namespace, keys in self.durable.items()}
        if len(self.regions()) > NUM_REGIONS:
            # Regions evicted before have come back with their names, and some must go again.
            self.forget_certainty()
        self.harmed = True
        self.engine = self.open()


class DirectoryMachine(StoreMachine):
    """In a real directory."""

    def make_device(self) -> FaultyDevice:
        return FaultyDevice(FileDevice(self.directory, direct=False))

    def crash(self) -> None:
        """From here on the old process reaches nothing, as if it were dead."""
        self.device.faults = [Fault(0, times=1 << 60, error=errno.EIO)]
        self.engine.close()
        self.device = self.make_device()


LIMITS = settings(
    stateful_step_count=30,
    derandomize=True,
    # An engine of many threads never fails twice in the same way: the first failure is the one to
    # show.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)

TestRegionMachine = RegionMachine.TestCase
TestRegionMachine.settings = settings(LIMITS, max_examples=100)
TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(LIMITS, max_examples=30)


A, B = ([key for key in KEYS if tenant_of(key) == tenant] for tenant in TENANTS[1:])
SMALL = [key for key in A if len(content(NAMESPACES[0], key)) <= BLOCK_BYTES][:1]
FILL = ("store", [[key] for key in KEYS])
RESTARTS = [("kill",), ("lookup", KEYS), ("reopen", NAMESPACES[0]), ("load", KEYS)]
OLD_NAMESPACE = [("set_namespace", NAMESPACES[1]), FILL, ("set_namespace", NAMESPACES[0]), FILL]
RUNS: dict[str, list[tuple[Any, ...]]] = {
    "what is acknowledged is there after each start": [("store", [KEYS[:6]]), *RESTARTS],
    "a flush outlives a loss of power": [
        *[("store", [KEYS[:6]]), ("sync",), ("store", [KEYS[6:8]])],
        *[("lose_power_now", "reorder", 3), ("load", KEYS), *RESTARTS],
    ],
    "namespaces share the log": [
        *[("store", [KEYS[:4]]), ("reopen", NAMESPACES[1]), ("lookup", KEYS[:4])],
        *[("store", [KEYS[:4]]), ("load", KEYS[:4]), ("reopen", NAMESPACES[0]), ("load", KEYS[:4])],
    ],
    "the later copy of a damaged page counts": [
        *[("store", [KEYS[:4]]), ("reopen", NAMESPACES[0])],
        *[("corrupt", 8 * (3 * BLOCK_BYTES + 7), 0), ("reopen", NAMESPACES[0]), ("load", KEYS[:4])],
        *[("store", [KEYS[:4]]), ("load", KEYS[:4]), *RESTARTS],
    ],
    "damage is not written anew": [
        *[("store", [SMALL]), ("load", SMALL), ("corrupt", 8 * 2 * BLOCK_BYTES, 0)],
        *[("store", [[key] for key in KEYS[:13]]), ("load", SMALL)],  # its region is gone
    ],
    "pages after a purge survive two losses of power": [
        *[("store", [A]), ("lose_power_after_a_purge", "drop", 0, TENANTS[1]), ("store", [A])],
        *[("sync",), ("lose_power_now", "drop", 0), ("load", A), *RESTARTS],
    ],
    "a pinned page outlives others, until it is unpinned": [
        *[("pin", "x", A[:3], TENANTS[1], None), ("pin", "y", A[:1], TENANTS[1], None)],
        *[("store", [A]), FILL, FILL, ("load", A), ("kill",), FILL, ("load", A), ("unpin", "x")],
        *[FILL, ("load", A), ("unpin", "y"), FILL, ("load", A)],
    ],
    "a pin goes when its time is over": [
        *[("store", [A]), ("pin", "x", A, TENANTS[1], 50.0), ("pin", "y", A[:1], TENANTS[1], None)],
        *[("expire",), ("sync",), ("kill",), ("pin", "z", A, TENANTS[1], 50.0)],
        *[("reopen", NAMESPACES[0]), ("expire",), ("kill",)],
    ],
    "a purge drops its tenant's pins": [
        *[("store", [A, B]), ("pin", "x", A, TENANTS[1], None), ("pin", "y", B, TENANTS[2], None)],
        *[("purge", TENANTS[1], A), ("kill",), FILL, ("load", B), ("clear",), ("kill",), FILL],
    ],
    "a forgotten page leaves its pins for good": [
        *[("store", [A]), ("pin", "x", A, TENANTS[1], None), ("pin", "y", A[:1], TENANTS[1], None)],
        *[("forget", A[:1], A[1:2]), ("store", [A]), ("kill",), FILL, ("load", A)],
        *[("pin", "z", B[:1], TENANTS[2], None), ("forget", B[:1], A), ("kill",), FILL],
    ],
    "a pin names the pages of the served namespace": [
        *[("store", [A]), ("pin", "x", A, TENANTS[1], None), *OLD_NAMESPACE, *RESTARTS]
    ],
    "what was erased in another namespace stays so": [
        *[("store", [A]), ("set_namespace", NAMESPACES[1]), ("forget", A[:2], A[2:3])],
        *[("purge", TENANTS[2], B), ("reopen", NAMESPACES[0]), ("load", A), *RESTARTS],
    ],
}


@pytest.mark.parametrize("machine", [RegionMachine, DirectoryMachine])
@pytest.mark.parametrize("steps", RUNS.values(), ids=[name.replace(" ", "-") for name in RUNS])
def test_a_named_run(machine: type[StoreMachine], steps: list[tuple[Any, ...]]) -> None:
    if machine is DirectoryMachine and any("lose" in step[0] for step in steps):
        pytest.skip("nobody can cut the power of a directory")
    lived = machine()
    try:
        for name, *arguments in steps:
            getattr(lived, name)(*arguments)
            lived.purged_pages_stay_away()
            lived.forgotten_pages_stay_away()
            lived.pins_are_what_was_asked()
            lived.fingerprints_are_told()
            lived.books_balance()
    finally:
        lived.teardown()
