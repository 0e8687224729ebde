"""Two engines on one directory against a model: stores, loads, refreshes, erasures, damage,
restarts and changes of namespace.

Pages may be missed where something was damaged or deleted. No engine may ever return other bytes
than were stored, nor a page that it has seen erased, nor one that another stored before it knew of
that; and what an engine was told of in a refresh, or stored itself, is a hit until then.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bucket_engines import open_engine
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulation import ledger
from simulation.ledger import TENANTS, tenant_of

from kit.waiting import TIMEOUT_S, finished
from sglang_tiered.storage.base import Erasure, Health, Reason, Run
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.bucket.names import Layout, parse_page
from sglang_tiered.storage.promises import is_true

NAMESPACES = (b"\x11" * 32, b"\x22" * 32)
KEYS = [random.Random(number).randbytes(32) for number in range(15)]
SERVED = {Reason.OK, Reason.DUPLICATE}

content = partial(ledger.content, sizes=(1, 100, 4096, 5000))
engines = st.sampled_from([0, 1])
chains = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True)
tenants = st.sampled_from(TENANTS)


class TwoEngines(RuleBasedStateMachine):
    """``present`` are the pages in the bucket that nobody purged, by namespace; ``may`` and
    ``must`` what each engine may and must serve now."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.now = time.time()
        self.present: dict[bytes, set[bytes]] = {name: set() for name in NAMESPACES}
        # Pages of which some copy was damaged: which copy counts is not the model's to know.
        self.damaged: dict[bytes, set[bytes]] = {name: set() for name in NAMESPACES}
        self.namespaces = [NAMESPACES[0], NAMESPACES[0]]
        self.may: list[set[bytes]] = [set(), set()]
        self.must: list[set[bytes]] = [set(), set()]
        self.erased: set[tuple[bytes, bytes]] = set()  # ever, by namespace
        # What the other erased since an engine looked: what it stores of it is dead for all others.
        self.unheard: list[set[tuple[bytes, bytes]]] = [set(), set()]
        self.looks = [True, True]  # its first pass in its namespace may still be under way
        self.engines = [self.open(number) for number in (0, 1)]

    def open(self, number: int) -> BucketEngine:
        options: dict[str, Any] = {"num_connections": 2, "wall_clock": lambda: self.now}
        url, namespace = self.directory.as_uri(), self.namespaces[number]
        return open_engine(url, namespace=namespace, **options)

    def teardown(self) -> None:
        for engine in self.engines:
            engine.close()
        shutil.rmtree(self.directory)

    @rule(number=engines, chosen=chains)
    def store(self, number: int, chosen: list[bytes]) -> None:
        engine, namespace = self.engines[number], self.namespaces[number]
        jobs = []
        for tenant in TENANTS:
            keys = tuple(key for key in chosen if tenant_of(key) == tenant)
            if keys:
                pages = tuple((memoryview(content(namespace, key)),) for key in keys)
                jobs.append(engine.submit_store(Run(keys, pages, tenant)))
        assert engine.flush(TIMEOUT_S)
        unheard = {key for of, key in self.unheard[number] if of == namespace}
        for job in jobs:
            for key, reason in zip(job.run.keys, finished(job), strict=True):
                hears = self.looks[number] and key in unheard
                assert reason in SERVED or (hears and reason is Reason.CANCELLED), reason
            stored = {
                key
                for key, reason in zip(job.run.keys, job.reasons, strict=True)
                if reason is Reason.OK
            }
            dead = set() if self.looks[number] else stored & unheard
            doubtful = (stored & unheard) - dead
            self.present[namespace] |= stored - dead
            self.damaged[namespace] |= doubtful
            self.may[number] |= stored
            self.must[number] |= stored - doubtful
            other = 1 - number
            if self.looks[other] and self.namespaces[other] == namespace:
                self.may[other] |= stored

    @rule(number=engines, chosen=chains)
    def load_some(self, number: int, chosen: list[bytes]) -> None:
        self.load(number, chosen)

    def load(self, number: int, chosen: list[bytes]) -> None:
        engine, namespace = self.engines[number], self.namespaces[number]
        right = [content(namespace, key) for key in chosen]
        pages = tuple((memoryview(bytearray(len(data))),) for data in right)
        reasons = finished(engine.submit_load(Run(tuple(chosen), pages)))
        for key, (page,), data, reason in zip(chosen, pages, right, reasons, strict=True):
            if reason is Reason.OK:
                assert page == data, "other bytes than were stored"
                assert key in self.may[number], "a page that was purged or never stored"
            else:
                assert reason in (Reason.MISS, Reason.CORRUPT), reason
                assert key not in self.must[number], f"{reason}, but nothing happened to it"

    @rule(number=engines, full=st.booleans())
    def refresh(self, number: int, full: bool) -> None:
        assert self.engines[number].refresh(TIMEOUT_S, full=full)
        known = self.present[self.namespaces[number]]
        self.looks[number] = False
        self.unheard[number].clear()
        self.may[number] = set(known)
        self.must[number] = known - self.damaged[self.namespaces[number]]

    def erase(self, number: int, what: Erasure, gone: set[bytes], namespaces: Any) -> None:
        assert is_true(self.engines[number].erase(what), TIMEOUT_S)
        for namespace in namespaces:
            self.present[namespace] -= gone
            self.damaged[namespace] -= gone
        pairs = {(namespace, key) for namespace in namespaces for key in gone}
        self.erased |= pairs
        self.unheard[1 - number] |= pairs
        # It has heard of all others: what it stored before that is from before.
        self.must[number] -= {key for _, key in self.unheard[number]}
        self.unheard[number].clear()
        self.may[number] -= gone
        for other in (0, 1):
            if self.namespaces[other] in namespaces:
                self.must[other] -= gone

    @rule(number=engines, tenant=tenants)
    def erase_tenant(self, number: int, tenant: bytes) -> None:
        gone = {key for key in KEYS if tenant_of(key) == tenant}
        self.erase(number, Erasure(tenant=tenant), gone, NAMESPACES)

    @rule(number=engines, chosen=chains)
    def erase_pages(self, number: int, chosen: list[bytes]) -> None:
        self.erase(number, Erasure.of(chosen), set(chosen), NAMESPACES)

    @rule(number=engines)
    def erase_all(self, number: int) -> None:
        self.erase(number, Erasure(), set(KEYS), [self.namespaces[number]])

    @rule(number=engines, namespace=st.sampled_from(NAMESPACES))
    def change_namespace(self, number: int, namespace: bytes) -> None:
        if namespace == self.namespaces[number]:
            return
        self.engines[number].set_namespace(namespace)
        self.namespaces[number] = namespace
        self.may[number] = set(self.present[namespace])
        self.must[number] = set()
        self.looks[number] = True
        self.unheard[number] = set(self.erased)

    @rule(number=engines)
    def restart(self, number: int) -> None:
        self.engines[number].close()
        self.may[number] = set(self.present[self.namespaces[number]])
        self.must[number] = set()
        self.looks[number] = True
        self.unheard[number] = set(self.erased)
        self.engines[number] = self.open(number)

    def objects(self) -> list[tuple[bytes, Path, bytes]]:
        """Namespace, file and key of every page."""
        return [
            (namespace, path, name.key)
            for namespace in NAMESPACES
            for path in sorted((self.directory / Layout(namespace).pages).glob("*/*"))
            if (name := parse_page(str(path))) is not None
        ]

    @precondition(lambda self: any(self.present.values()))
    @rule(choice=st.integers(0, 1 << 30), how=st.sampled_from(["flip", "cut", "object", "moved"]))
    def damage(self, choice: int, how: str) -> None:
        found = self.objects()
        if not found:
            return
        namespace, path, key = found[choice % len(found)]
        data = bytearray(path.read_bytes() or b"?")
        if how == "flip":
            data[choice % len(data)] ^= 1 << choice % 8
            path.write_bytes(data)
        elif how == "cut":
            path.write_bytes(data[: choice % len(data)])
        elif how == "moved":  # under the name of another
            _, other, _ = found[(choice // 7) % len(found)]
            path.write_bytes(other.read_bytes())
        else:
            path.unlink()
        self.damaged[namespace].add(key)
        for number in (0, 1):
            if self.namespaces[number] == namespace:
                self.must[number].discard(key)
                self.load(number, [key])

    @invariant()
    def time_passes(self) -> None:
        self.now += 0.01

    @invariant()
    def lookups_agree(self) -> None:
        for number, engine in enumerate(self.engines):
            assert engine.stats().health is Health.RUNNING, engine.stats().health_reason
            held = dict(zip(KEYS, engine.contains(KEYS), strict=True))
            extra = {key for key in KEYS if held[key]} - self.may[number]
            assert not extra, f"engine {number} shows pages that were purged or never stored"
            missing = {key for key in self.must[number] if not held[key]}
            assert not missing, f"engine {number} has lost {len(missing)} pages"

    @invariant()
    def books_balance(self) -> None:
        for engine in self.engines:
            engine.check_integrity()


TwoEngines.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=25,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
test_two_engines_keep_their_promises = TwoEngines.TestCase
