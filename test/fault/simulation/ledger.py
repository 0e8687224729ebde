"""What a workload stored, what the engine owes for it, and whether it pays.

The bytes of a page follow from its namespace and key, so every hit can be judged, whoever stored it
and before whichever crash. ``Ledger.check`` is the invariant of the store:

* a hit returns exactly the bytes stored under its key, and touches nothing beside them;
* a page that is owed is a hit;
* a page that lookup promises comes back, unless its bytes are not on the disk any more;
* a key that was never stored is a miss.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kit.runs import NAMESPACE
from kit.waiting import finished
from sglang_tiered.storage.base import (
    NO_TENANT,
    Health,
    Job,
    Page,
    PinRefusal,
    Reason,
    Run,
    Stop,
    TierEngine,
)
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.format import BLOCK_BYTES

TIMEOUT_S = 30.0
SIZES = (4096, 5000, 8192, 12_288)
TENANTS = (NO_TENANT, b"a" * 16, b"b" * 16)
_GUARD = b"\x5c" * 64
_CANARY = b"\xa5"
_NEVER_STORED = 1_000_000


@functools.cache
def key(number: int) -> bytes:
    """A key like the digests that serve as keys, but every third one shares its first half with
    its family and every third its second: an index must tell them apart by all 32 bytes."""
    digest = hashlib.sha256(b"page %d" % number).digest()
    family = hashlib.sha256(b"family %d" % (number // 12)).digest()
    return (digest, family[:16] + digest[16:], digest[:16] + family[16:])[number % 3]


def keys(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def tenant_of(key: bytes) -> bytes:
    """Keys of different tenants never coincide."""
    return TENANTS[key[0] % len(TENANTS)]


@functools.lru_cache(maxsize=4096)
def content(namespace: bytes, key: bytes, sizes: Sequence[int] = SIZES) -> bytes:
    """The one right answer for a key: its length and bytes follow from key and namespace."""
    source = random.Random(namespace + key)
    data = bytearray(source.randbytes(source.choice(sizes)))
    if key[1] % 2:  # a codec makes it shorter
        data[1::2] = bytes(len(data) // 2)
    return bytes(data)


def submit(engine: TierEngine, wanted: Sequence[bytes], tenant: bytes = NO_TENANT) -> Job:
    """Begin a store of the pages that those keys have."""
    pages = tuple((memoryview(content(NAMESPACE, each)),) for each in wanted)
    return engine.submit_store(Run(tuple(wanted), pages, tenant))


def store(engine: TierEngine, wanted: Sequence[bytes], tenant: bytes = NO_TENANT) -> list[Reason]:
    return finished(submit(engine, wanted, tenant))


def pin(engine: RegionEngine, name: str, wanted: Sequence[bytes], data: bytes = b"") -> bool:
    """Whether it became durable."""
    made = engine.pin(name, wanted, data=data)
    assert not isinstance(made, PinRefusal), made
    return is_true(made, TIMEOUT_S)


def held(engine: RegionEngine, wanted: Sequence[bytes]) -> int:
    """Pages that load, which are checked to be the right ones."""
    assert engine.stats().health is Health.RUNNING, engine.stats()
    return Ledger().load(engine, wanted).count(Reason.OK)


class Loaded:
    """Buffers to load pages into, between guards, filled with a byte that shows."""

    def __init__(self, namespace: bytes, wanted: Sequence[bytes]) -> None:
        self.namespace = namespace
        self._buffers: list[bytearray] = []
        pages: list[Page] = []
        for number, each in enumerate(wanted):
            length = len(content(namespace, each))
            self._buffers.append(bytearray(_GUARD + _CANARY * length + _GUARD))
            page = memoryview(self._buffers[-1])[len(_GUARD) : -len(_GUARD)]
            cut = (0, 1, length // 2, length)[number % 4]
            pages.append((page[:cut], page[cut:]))
        self.run = Run(tuple(wanted), tuple(pages))

    def check(self, job: Job) -> list[Reason]:
        """Wait for the load; every page it calls OK must be right, no guard touched."""
        assert job.wait(TIMEOUT_S), "a load did not finish"
        for each, buffer, reason in zip(self.run.keys, self._buffers, job.reasons, strict=True):
            assert buffer.startswith(_GUARD), "bytes before a page were touched"
            assert buffer.endswith(_GUARD), "bytes behind a page were touched"
            if reason is Reason.OK:
                right = buffer[len(_GUARD) : -len(_GUARD)] == content(self.namespace, each)
                assert right, f"wrong bytes were served for {each[:4].hex()}"
        return job.reasons


@dataclass
class Ledger:
    namespace: bytes = NAMESPACE
    submitted: set[bytes] = field(default_factory=set)
    perhaps_twice: set[bytes] = field(default_factory=set)  # on the disk
    acknowledged: set[bytes] = field(default_factory=set)
    durable: set[bytes] = field(default_factory=set)  # acknowledged before a completed barrier

    def submit(self, engine: RegionEngine, wanted: Sequence[bytes]) -> Job:
        self.perhaps_twice.update(self.submitted.intersection(wanted))
        self.submitted.update(wanted)
        data = [content(self.namespace, each) for each in wanted]
        pages = tuple((memoryview(d)[: len(d) // 3], memoryview(d)[len(d) // 3 :]) for d in data)
        return engine.submit_store(Run(tuple(wanted), pages))

    def settle(self, job: Job) -> list[Reason]:
        """Wait for a store and book what it acknowledges. A duplicate is no acknowledgement: it
        may be of a store that is still under way."""
        assert job.wait(TIMEOUT_S), "a store did not finish"
        for each, reason in zip(job.run.keys, job.reasons, strict=True):
            if reason is Reason.OK:
                self.acknowledged.add(each)
        return job.reasons

    def store(self, engine: RegionEngine, wanted: Sequence[bytes]) -> list[Reason]:
        return self.settle(self.submit(engine, wanted))

    def sync(self, engine: RegionEngine) -> bool:
        before = set(self.acknowledged)
        completed = engine.flush(TIMEOUT_S)
        if completed:
            self.durable |= before
        return completed

    def load(self, engine: RegionEngine, wanted: Sequence[bytes]) -> list[Reason]:
        target = Loaded(self.namespace, wanted)
        return target.check(engine.submit_load(target.run))

    def check(
        self,
        engine: RegionEngine,
        owed: Iterable[bytes] = (),
        files: Mapping[str, bytes] | None = None,
    ) -> set[bytes]:
        """Assert the invariant; returns the keys that came back. ``files`` is what the disk holds,
        where something on it may have been lost: only then may a promised page fail. A page that
        may lie there twice is not judged by that, as lookup knows the later copy only."""
        assert engine.stats().health is Health.RUNNING, engine.stats()
        stranger = key(_NEVER_STORED)
        assert engine.lookup([stranger]).num_hits == 0, "a key never stored is a hit"
        wanted = sorted(self.submitted)
        looked_up = {each: engine.lookup([each]) for each in wanted}
        promised = {each for each, result in looked_up.items() if result.num_hits}
        # What reclaim saved from its victim may be on its way back into the log.
        coming = {each for each, result in looked_up.items() if result.stop is Stop.PENDING}
        reasons = self.load(engine, [*wanted, stranger])
        found = {each for each, r in zip(wanted, reasons, strict=False) if r is Reason.OK}
        assert found <= promised | coming, "a page was served that lookup did not know"
        for each in promised - found - self.perhaps_twice:
            intact = files is None or _on_disk(files, content(self.namespace, each))
            assert not intact, f"{each[:4].hex()} was promised, is on the disk, and did not load"
        lost = sorted(each[:4].hex() for each in set(owed) - found)
        assert not lost, f"{len(lost)} pages that are owed were lost: {lost}"
        engine.check_integrity()
        return found


def fill(engine: RegionEngine, start: int, num_stores: int) -> None:
    """Store pages of these numbers, three at a time."""
    for number in range(start, start + 3 * num_stores, 3):
        Ledger().store(engine, keys(range(number, number + 3)))


def _on_disk(files: Mapping[str, bytes], data: bytes) -> bool:
    for file in files.values():
        position = file.find(data)
        while position >= 0:
            if position % BLOCK_BYTES == 0:
                return True
            position = file.find(data, position + 1)
    return False
