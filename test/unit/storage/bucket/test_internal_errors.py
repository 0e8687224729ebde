"""An unforeseen exception costs one job and a while of health, but no thread."""

from __future__ import annotations

from typing import Any

import pytest

from kit.clock import Clock
from kit.faulty import fail_once
from kit.request_hooks import listed
from kit.runs import blank, make_run, of
from kit.tiers import load, store
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.storage.base import Erasure, Health, Reason
from sglang_tiered.storage.bucket import transfers
from sglang_tiered.storage.promises import is_true


class Panic(BaseException):
    """As the library's own: none of ``Exception``."""


@pytest.mark.parametrize("error", [MemoryError(), Panic()], ids=["memory", "library"])
@pytest.mark.parametrize("name", ["page_checksum", "put", "is_page"])
def test_an_internal_error_ends_one_job_alone(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, name: str
) -> None:
    clock, run = Clock(100.0), make_run(1, [99])
    engine = make_engine(num_connections=1, clocks={"clock": clock})
    assert engine.refresh(TIMEOUT_S)  # or its first pass ends the pause
    if name == "is_page":
        store(engine, run)
    fail_once(monkeypatch, engine._requests if name == "put" else transfers, name, error)
    submit = engine.submit_load if name == "is_page" else engine.submit_store
    assert finished(submit(blank(run))) == [Reason.IO_ERROR]
    assert engine.stats().queued_store_bytes == 0
    assert engine.health is Health.MISS_ONLY
    assert "internal error" in engine.stats().health_reason
    clock.now += 100.0
    assert engine.refresh(TIMEOUT_S), "the bucket answers"
    assert engine.health is Health.RUNNING
    assert finished(engine.submit_store(run))[0] in (Reason.OK, Reason.DUPLICATE)
    assert load(engine, run) == [Reason.OK]
    assert all(thread.is_alive() for thread in engine._workers._threads)


def test_an_owner_that_fails_ends_no_discovery(make_engine: Any) -> None:
    """As one whose disk or memory is full for a moment, when it is told what was erased."""
    run, fails = make_run(1, [100]), [MemoryError(), MemoryError()]
    a, clock = make_engine(), Clock(1000.0)
    b = make_engine(clocks={"clock": clock})
    assert b.refresh(TIMEOUT_S)

    def told(_: object) -> None:
        if fails:
            raise fails.pop()

    b.report_erased(told)
    assert is_true(a.erase(Erasure.of([b"k" * 32])), TIMEOUT_S)
    assert finished(a.submit_store(run)) == [Reason.OK]
    assert b.refresh(TIMEOUT_S)
    assert b.contains(run.keys) == [True], "it hears of new pages all the same"
    for _ in range(2):
        assert not b._state.seen, "what it stores would count as younger"
        clock.now += 3.0
        b._wake_discovery()
        eventually(lambda: not fails, "it tells again by itself")
    eventually(lambda: b._state.seen)


def test_a_first_pass_that_fails_is_paused(make_engine: Any) -> None:
    clock, seen = Clock(1000.0), list[None]()
    engine = make_engine(clocks={"clock": clock})
    assert engine.refresh(TIMEOUT_S)

    def fail(*_: object) -> None:
        seen.append(None)
        raise RuntimeError

    engine._requests.each = fail  # type: ignore[method-assign, assignment]
    engine.set_namespace(b"\x22" * 32)
    eventually(lambda: seen, "it looks at the new one")
    assert not engine.refresh(TIMEOUT_S) and not engine.refresh(TIMEOUT_S)
    assert len(seen) == 3, "it spins"
    clock.now += 1.5
    engine._wake_discovery()
    eventually(lambda: len(seen) == 4, "it gave up")


def test_erasures_are_finished_after_internal_errors(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    store(engine, of(b"a" * 16, make_run(1, [4096])))
    fail_once(monkeypatch, engine._requests, "folders", MemoryError())
    assert not is_true(engine.erase(Erasure(tenant=b"a" * 16)), TIMEOUT_S)
    eventually(lambda: not listed(engine, engine._state.layout.pages), "it is not tried again")
