"""Whatever happens between three tiers in whatever order: a page that is served is the one that was
stored, a purged one never is, and the books balance."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from shared_tier import SharedTier

from kit.runs import blank, make_run, of
from kit.tiers import open_region
from kit.waiting import TIMEOUT_S, drained, finished
from sglang_tiered.storage.base import REMOTE_TIERS, Erasure, Reason, Tier
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.stack import TierStack
from sglang_tiered.storage.stack.demotion import StackSettings

TENANTS = (b"a" * 16, b"b" * 16)
PAGE_BYTES, NUM_PAGES, NUM_RUNS = 20_000, 3, 6
OPERATIONS = (
    "store", "store", "share", "load", "load", "load", "purge", "told", "forget", "hear", "sicken",
    "sicken", "heal", "heal", "turn", "flush", "restart",
)  # fmt: skip


RUNS = [of(TENANTS[n % 2], make_run(n, [PAGE_BYTES] * NUM_PAGES)) for n in range(NUM_RUNS)]


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bucket, self.peers = SharedTier(), SharedTier(tier=Tier.PEER)
        self.order = REMOTE_TIERS
        self.engine = self.open()
        self.stored: set[int] = set()

    def open(self) -> TierStack:
        # Four regions: what was stored is soon reclaimed.
        upper = open_region(self.directory, capacity_bytes=1 << 18, region_bytes=1 << 16)
        bounds = StackSettings(
            staging_bytes=1 << 15, batch_bytes=1 << 14, promotion_bytes=1 << 15, retry_s=0.001
        )
        return TierStack(upper, [self.peers, self.bucket], bounds, order=lambda: self.order)

    def store(self, number: int) -> None:
        job = self.engine.submit_store(RUNS[number])
        assert job.wait(TIMEOUT_S)
        if all(job.ok):
            self.stored.add(number)

    def share(self, number: int) -> None:
        """Another server holds it."""
        if all(self.peers.submit_store(RUNS[number]).ok):
            self.stored.add(number)

    def load(self, number: int) -> None:
        run, target = RUNS[number], blank(RUNS[number])
        job = self.engine.submit_load(target, deadline_s=TIMEOUT_S, tenant=run.tenant)
        for (source,), (buffer,), reason in zip(
            run.pages, target.pages, finished(job), strict=True
        ):
            assert reason in (Reason.OK, Reason.MISS)
            assert reason is not Reason.OK or number in self.stored, "a purged page was served"
            assert reason is not Reason.OK or source == buffer, "other bytes were served"

    def purge(self, number: int, *, spread: bool = True) -> None:
        what = Erasure(tenant=TENANTS[number % 2], spread=spread)
        assert is_true(self.engine.erase(what), TIMEOUT_S)
        self.stored -= {other for other in self.stored if other % 2 == number % 2}

    def told(self, number: int) -> None:
        """Another server purged: it forgot before it told us, and so did the bucket, or soon."""
        self.peers.erase(Erasure(tenant=TENANTS[number % 2]))
        self.purge(number, spread=False)

    def forget(self, number: int, *, spread: bool = True) -> None:
        what = Erasure.of(RUNS[number].keys, spread=spread)
        assert is_true(self.engine.erase(what), TIMEOUT_S)
        self.stored.discard(number)

    def hear(self, number: int) -> None:
        """Another server forgot pages, in the index and the bucket too, and this one is told."""
        for tier in (self.peers, self.bucket):
            tier.erase(Erasure.of(RUNS[number].keys))
        self.forget(number, spread=False)

    def sicken(self, number: int) -> None:
        (self.bucket, self.peers)[number % 2].sick = True

    def heal(self, number: int) -> None:
        (self.bucket, self.peers)[number % 2].sick = False

    def turn(self, _: int) -> None:
        self.order = self.order[::-1]

    def flush(self, number: int) -> None:
        run = RUNS[number]
        self.bucket.sick = False
        durable = self.engine.flush_to_bucket(run.keys, TIMEOUT_S)
        assert durable == self.bucket.contains(run.keys)
        assert number in self.stored or not any(durable), "a purged page was copied"

    def restart(self, _: int) -> None:
        drained(self.engine, TIMEOUT_S)
        self.engine._demoter.close()
        self.engine.nvme.close()  # what others hold lives on
        self.engine._loader.close()
        self.engine = self.open()

    def end(self) -> None:
        assert drained(self.engine, TIMEOUT_S)
        assert drained(self.engine.nvme, TIMEOUT_S)  # a load promotes pages before it ends
        self.engine.check_integrity()
        for number, run in enumerate(RUNS):
            if number not in self.stored:
                assert self.engine.lookup(run.keys).num_hits == 0, "a purged page is a hit"
        self.engine.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, NUM_RUNS - 1)), max_size=25))
def test_no_order_of_events_serves_a_wrong_page(events: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "store")
        try:
            for name, number in events:
                getattr(world, name)(number)
        finally:
            world.bucket.sick = world.peers.sick = False
            world.end()
