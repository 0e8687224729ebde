"""Pages for others out of host memory: what the store holds, whatever is written there."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from host_pools import PAGE_SIZE, Pool, make_pool, slots

from kit.faulty import FaultyDevice
from kit.runs import NAMESPACE, OTHER_NAMESPACE, make_run, of, page_data, soft_encoding
from kit.waiting import TIMEOUT_S, finished
from sglang_tiered.integration.storage.host_pages import SeenPages
from sglang_tiered.storage.base import Erasure, Reason, Run
from sglang_tiered.storage.encoding import PageEncoding
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice

pytestmark = pytest.mark.timeout(120)

HALF = 100_000  # bytes of K, and of V, of a page
TENANT = b"a" * 16
NUM_SLOTS, NUM_PAGES, NUM_THREADS = 8, 20, 4
MANY = 200


@dataclass
class Server:
    """A store with pages, and host memory that has some of them."""

    region: RegionEngine
    run: Run
    operations: list[str]  # of the device
    pool: Pool = field(default_factory=lambda: make_pool(None, HALF, NUM_SLOTS))

    def __post_init__(self) -> None:
        self.held = SeenPages(self.pool, PAGE_SIZE)
        self.region.use_memory(self.held)
        assert set(finished(self.region.submit_store(self.run))) == {Reason.OK}
        self.pages = page_data(self.run)

    def write(self, slot: int, data: bytes) -> None:
        page = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.pool.buffer[:, slot] = page.view(2, HALF)

    def hold(self, number: int, slot: int) -> None:
        """Bring a page into host memory, as a load or a store does."""
        self.write(slot, self.pages[number])
        self.held.note([self.run.keys[number]], slots(slot), [True])

    def read(self, *numbers: int, for_request: bool = False) -> list[bytes | None]:
        """What others are given of the pages with these numbers."""
        keys = tuple(self.run.keys[number] for number in numbers)
        pages = tuple((memoryview(bytearray(2 * HALF)),) for _ in numbers)
        job = self.region.submit_load(Run(keys, pages), for_request=for_request)
        return [
            data if reason is Reason.OK else None
            for reason, data in zip(finished(job), page_data(job.run), strict=True)
        ]

    @property
    def num_reads(self) -> int:
        return self.operations.count("readv")

    @property
    def num_from_memory(self) -> int:
        return self.region.stats().num_pages_from_memory


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    opened: list[RegionEngine] = []

    def serve(run: Run | None = None, encoding: PageEncoding | None = None) -> Server:
        operations: list[str] = []
        (tmp_path / "store").mkdir()
        device = FaultyDevice(FileDevice(tmp_path / "store"), before=operations.append)
        region = RegionEngine(
            tmp_path / "store",
            namespace=NAMESPACE,
            capacity_bytes=1 << 25,
            region_bytes=1 << 23,
            num_threads=NUM_THREADS,
            device=device,
            encoding=encoding,
        )
        opened.append(region)
        return Server(region, run or of(TENANT, make_run(5, [2 * HALF] * NUM_PAGES)), operations)

    yield serve
    for region in opened:
        region.close()


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


def test_pages_in_memory_are_copied_not_read(server: Server) -> None:
    for number, slot in ((3, 5), (4, 0), (9, 7)):
        server.hold(number, slot)
    before = server.num_reads
    assert server.read(3, 4, 9) == [server.pages[number] for number in (3, 4, 9)]
    assert server.num_reads == before
    stats = server.region.stats()
    assert (stats.num_pages_from_memory, stats.num_pages_copied) == (3, 3)
    assert server.read(3, for_request=True) == [server.pages[3]]
    assert server.num_reads > before, "a load of its own came from there"
    assert server.num_from_memory == 3


@pytest.mark.parametrize("what", ["page", "tenant", "weights", "closed"])
def test_what_is_hidden_is_not_given_from_memory(server: Server, what: str) -> None:
    server.hold(3, 5)
    if what == "page":
        assert is_true(server.region.erase(Erasure.of([server.run.keys[3]])), TIMEOUT_S)
    elif what == "tenant":
        assert is_true(server.region.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
    elif what == "weights":
        server.region.set_namespace(OTHER_NAMESPACE)
    else:
        server.region.close()
    assert server.read(3) == [None]
    assert server.num_from_memory == 0


@pytest.mark.parametrize("what", ["another page", "one bit", "half of it", "other weights"])
def test_memory_that_does_not_fit_is_read(server: Server, what: str) -> None:
    """And not looked at again, until the page is noted once more."""
    server.hold(3, 5)
    if what == "another page":
        server.write(5, server.pages[4])
    elif what == "one bit":  # computed again, with other rounding
        server.pool.buffer[1, 5, 17] ^= 1
    elif what == "half of it":
        server.pool.buffer[1, 5] = 0
    else:
        again = Run(server.run.keys[3:4], ((memoryview(bytes(2 * HALF)),),), TENANT)
        server.region.set_namespace(OTHER_NAMESPACE)
        assert finished(server.region.submit_store(again)) == [Reason.OK]
        server.pages[3] = bytes(2 * HALF)
    assert server.read(3) == [server.pages[3]]
    assert server.num_from_memory == 0
    assert server.held.find([server.run.keys[3]]) is None
    server.hold(3, 5)
    assert server.read(3) == [server.pages[3]]
    assert server.num_from_memory == 1


def test_encoded_pages_are_read_however_wanted(serve: Callable[..., Server]) -> None:
    """No checksum is known of what memory has of them: whole, or as they are stored."""
    data = np.zeros(2 * HALF, np.uint8)
    data[::2] = np.random.default_rng(1).integers(0, 256, HALF, dtype=np.uint8)
    server = serve(Run((b"k" * 32,), ((memoryview(data.tobytes()),),)), encoding=soft_encoding())
    server.hold(0, 2)
    (stored,) = server.region.view.find(server.run.keys)
    assert stored.length < 2 * HALF
    assert server.read(0) == server.pages
    as_stored = Run(server.run.keys, ((memoryview(bytearray(stored.length)),),))
    assert finished(server.region.submit_load(as_stored, for_request=False)) == [Reason.OK]
    assert server.num_from_memory == 0


def test_memory_reused_meanwhile_never_gives_wrong_bytes(server: Server) -> None:
    """While slots get other pages all the time, and are told of late."""
    stop = threading.Event()

    def reuse() -> None:
        source = random.Random(1)
        while not stop.is_set():
            server.hold(source.randrange(NUM_PAGES), source.randrange(NUM_SLOTS))

    threads = [threading.Thread(target=reuse) for _ in range(2)]
    for thread in threads:
        thread.start()
    source, num_wanted = random.Random(2), 0
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while server.num_from_memory < MANY:
            assert time.monotonic() < deadline
            numbers = source.sample(range(NUM_PAGES), 2)
            num_wanted += 2
            expected = [server.pages[number] for number in numbers]
            assert server.read(*numbers) == expected
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert server.num_from_memory < num_wanted, "nothing was read: there was no race"


def test_hints_are_bounded_by_slots_and_last_noted() -> None:
    source, held = random.Random(3), SeenPages(make_pool(None, 16, NUM_SLOTS), PAGE_SIZE)
    keys = [bytes([number]) * 32 for number in range(30)]
    expected: dict[bytes, int] = {}
    for _ in range(3000):
        key, slot = source.choice(keys), source.randrange(NUM_SLOTS)
        if source.random() < 0.2:
            held.forget([key])
            expected.pop(key, None)
        else:
            held.note([key, b"z" * 32], torch.cat([slots(slot), slots(0)]), [True, False])
            expected = {each: at for each, at in expected.items() if at != slot}
            expected[key] = slot
        assert held._firsts == {each: at * PAGE_SIZE for each, at in expected.items()}
        assert len(held._keys) <= NUM_SLOTS
    known = list(expected)
    found = held.find(known)
    places = [held._pool.buffer[half, expected[key]].data_ptr() for key in known for half in (0, 1)]
    assert [
        np.frombuffer(segment, np.uint8).ctypes.data for page in found for segment in page
    ] == places
    assert held.find([*known, b"z" * 32]) is None


def test_memory_that_fails_is_read(serve: Callable[..., Server]) -> None:
    """A fault of the owner's is none of the device's, and costs others no page."""
    server = serve()
    server.hold(3, slot=1)
    server.held.find = lambda _: 1 // 0  # type: ignore[assignment, method-assign]
    assert server.read(3) == [server.pages[3]] and server.num_from_memory == 0
