"""One engine: packing, flushing, deadlines, damage, budgets, and what a bucket that fails does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from kit.waiting import TIMEOUT_S, drained, finished
from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.base import Health, Reason, Run, Stop
from sglang_tiered.storage.object.failures import Failure, RequestError
from sglang_tiered.storage.object.format import MAX_MANIFEST_BYTES, unpack_manifest, unpack_tail

if TYPE_CHECKING:
    from pathlib import Path

    from kit.runs import Blank, MakeRun, PageData
    from sglang_tiered.storage.object import ObjectEngine

MakeEngine = Callable[..., "ObjectEngine"]

A, B = b"a" * 16, b"b" * 16


def of(tenant: bytes, run: Run) -> Run:
    return Run(run.keys, run.pages, tenant)


def paths(engine: ObjectEngine, folder: str) -> list[str]:
    place = getattr(engine._state.layout, folder)
    return sorted(entry.path for chunk in engine._client.listing(place) for entry in chunk)


class Gate:
    """Holds the requests of one kind until it is opened."""

    def __init__(self, engine: ObjectEngine, kind: str) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._inner = getattr(engine._client, kind)
        setattr(engine._client, kind, self._held)

    def _held(self, *arguments: Any, **named: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(TIMEOUT_S), "the gate stayed closed"
        return self._inner(*arguments, **named)


def fail(
    engine: ObjectEngine, monkeypatch: pytest.MonkeyPatch, kind: str, failure: Failure
) -> list[bool]:
    """Let every request of a kind fail, until the list is emptied."""
    inner, failing = getattr(engine._client, kind), [True]

    def request(*arguments: Any, **named: Any) -> Any:
        if not failing:
            return inner(*arguments, **named)
        error = RequestError(failure, "get was answered with status 503")
        if kind != "put":
            engine._note(None if failure is Failure.NOT_FOUND else error)
        raise error

    monkeypatch.setattr(engine._client, kind, request)
    return failing


def test_runs_of_a_tenant_lie_side_by_side(
    make_engine: MakeEngine, make_run: MakeRun, page_data: PageData
) -> None:
    engine = make_engine(linger_s=3600.0)
    runs = [of(A, make_run(seed, [4096, 5000])) for seed in range(5)]
    jobs = [engine.submit_store(run) for run in runs]
    other = engine.submit_store(of(B, make_run(9, [4096])))
    assert not any(job.done for job in (*jobs, other))
    assert engine.lookup(runs[0].keys).stop is Stop.PENDING
    assert engine.flush(TIMEOUT_S)
    assert {reason for job in (*jobs, other) for reason in finished(job)} == {Reason.OK}
    objects, manifests = paths(engine, "objects"), paths(engine, "manifests")
    assert len(objects) == len(manifests) == 2
    found = {
        manifest.tenant: (path, manifest)
        for path in manifests
        if (manifest := unpack_manifest(engine._client.get(path))) is not None
    }
    path, manifest = found[A]
    data = bytes(engine._client.get(path.replace("manifests", "objects")))
    assert data.startswith(b"".join(page for run in runs for page in page_data(run)))
    nbytes = unpack_tail(data)
    assert nbytes is not None
    assert unpack_manifest(data[-16 - nbytes : -16]) is not None
    assert len(data) == manifest.object_bytes
    assert manifest.tenant == A


def test_a_full_object_closes_and_the_next_opens(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    engine = make_engine(linger_s=3600.0)
    run = make_run(1, [50_000] * 12)  # five to an object
    job = engine.submit_store(run)
    poll_until(lambda: len(paths(engine, "manifests")) == 2)
    assert not job.done
    assert engine.flush(TIMEOUT_S)
    target = blank(run)
    assert finished(engine.submit_load(target)) == [Reason.OK] * 12
    assert page_data(target) == page_data(run)
    assert len(paths(engine, "objects")) == 3


def poll_until(condition: Callable[[], bool]) -> None:
    turn = threading.Event()
    for _ in range(2000):
        if condition():
            return
        turn.wait(0.01)
    pytest.fail("it did not come to pass")


def test_an_object_lingers_no_longer_than_it_should(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    engine = make_engine(linger_s=0.05)
    run = make_run(1, [4096])
    assert finished(engine.submit_store(run)) == [Reason.OK]


def test_stores_beyond_staging_are_rejected_at_once(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    engine = make_engine()
    gate = Gate(engine, "put")
    jobs = [engine.submit_store(make_run(seed, [250_000])) for seed in range(40)]
    rejected = [job for job in jobs if job.done]
    assert all(job.reasons == [Reason.REJECTED] for job in rejected)
    assert 20 <= len(rejected) < 40
    assert engine.object_stats().staged_bytes <= 4 << 20
    gate.opened.set()
    assert drained(engine, TIMEOUT_S)
    assert {job.reasons[0] for job in jobs} == {Reason.OK, Reason.REJECTED}
    assert engine.stats().queued_store_bytes == 0


def test_a_store_beyond_staging_keeps_its_leading_pages(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    engine = make_engine()
    run = make_run(1, [250_000] * 20)
    assert finished(engine.submit_store(run)) == [Reason.OK] * 16 + [Reason.REJECTED] * 4
    assert finished(engine.submit_store(run)) == [Reason.DUPLICATE] * 16 + [Reason.OK] * 4


def test_a_page_beyond_object_size_has_its_own(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    engine = make_engine()
    run = make_run(1, [4096, 1 << 20, 4096, (4 << 20) + 1])
    reasons = finished(engine.submit_store(run))
    assert reasons == [Reason.OK] * 3 + [Reason.NO_SPACE], "the last is more than can be staged"
    assert len(paths(engine, "objects")) == 3
    target = blank(run)
    assert finished(engine.submit_load(target)) == [Reason.OK] * 3 + [Reason.MISS]
    assert page_data(target)[:3] == page_data(run)[:3]


def test_open_objects_close_before_stores_are_rejected(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    engine = make_engine(linger_s=3600.0)
    for number in range(64):
        job = engine.submit_store(of(bytes([number + 1]) * 16, make_run(number, [120_000])))
        poll_until(lambda: engine._state.packing is None and not engine._state.stores)
        poll_until(lambda: engine._state.staged_bytes <= 3 << 20)
        assert not job.done or job.reasons == [Reason.OK]


def test_a_late_load_leaves_its_buffers_untouched(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    engine = make_engine()
    run = make_run(1, [4096] * 4)
    finished(engine.submit_store(run))
    gate = Gate(engine, "get_range")
    target = blank(run)
    job = engine.submit_load(target, deadline_s=0.05)
    assert gate.reached.wait(TIMEOUT_S)
    assert finished(job) == [Reason.IO_ERROR] * 4
    gate.opened.set()
    again = blank(run)
    assert finished(engine.submit_load(again, deadline_s=TIMEOUT_S)) == [Reason.OK] * 4
    poll_until(lambda: not engine._state.load_tickets)
    assert page_data(target) == page_data(blank(run)), "a buffer was touched after its job"
    assert finished(engine.submit_load(target, deadline_s=0.0)) == [Reason.IO_ERROR] * 4


def test_a_deadline_does_not_cost_what_already_arrived(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    engine = make_engine(num_connections=1)
    first, second = make_run(1, [4096]), make_run(2, [4096])
    for run in (first, second):
        finished(engine.submit_store(run))
    inner, served = engine._client.get_range, threading.Event()
    opened = threading.Event()

    def second_hangs(*arguments: Any, **named: Any) -> Any:
        if served.is_set():
            assert opened.wait(TIMEOUT_S)
        served.set()
        return inner(*arguments, **named)

    engine._client.get_range = second_hangs  # type: ignore[method-assign]
    both = Run(first.keys + second.keys, first.pages + second.pages)
    target = blank(both)
    reasons = finished(engine.submit_load(target, deadline_s=0.3))
    opened.set()
    assert reasons == [Reason.OK, Reason.IO_ERROR]
    assert page_data(target)[0] == page_data(first)[0]


def test_a_missing_object_is_forgotten_whole(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank
) -> None:
    engine = make_engine(linger_s=3600.0)
    run, other = make_run(1, [4096] * 3), of(A, make_run(2, [4096]))
    for each in (run, other):
        engine.submit_store(each)
    assert engine.flush(TIMEOUT_S)
    gone = [p for p in paths(engine, "objects") if p.endswith("-00000000")]
    engine._client.delete(gone)
    part = Run(run.keys[1:2], run.pages[1:2])
    both = Run(part.keys + other.keys, part.pages + other.pages)
    assert finished(engine.submit_load(blank(both))) == [Reason.MISS, Reason.OK]
    assert engine.lookup(run.keys).num_hits == 0
    assert engine.contains([*run.keys, *other.keys]) == [False] * 3 + [True]
    assert engine.refresh(TIMEOUT_S)
    assert engine.lookup(run.keys).num_hits == 0, "its manifest brought it back"
    assert engine.stats().health is Health.RUNNING
    job = engine.submit_store(run)
    assert engine.flush(TIMEOUT_S)
    assert job.reasons == [Reason.OK] * 3


@pytest.mark.parametrize("left", [0, 5000])
def test_a_truncated_object_serves_its_whole_pages(
    make_engine: MakeEngine,
    make_run: MakeRun,
    blank: Blank,
    page_data: PageData,
    tmp_path: Path,
    left: int,
) -> None:
    engine = make_engine(url=(tmp_path / "store").as_uri())
    run = make_run(1, [4096] * 3)
    finished(engine.submit_store(run))
    (path,) = paths(engine, "objects")
    (tmp_path / "store" / path).write_bytes(b"".join(page_data(run))[:left])
    target = blank(run)
    whole = left // 4096
    assert finished(engine.submit_load(target)) == [Reason.OK] * whole + [Reason.CORRUPT] * (
        3 - whole
    )
    assert page_data(target)[:whole] == page_data(run)[:whole]
    assert engine.lookup(run.keys).num_hits == whole
    assert engine.stats().health is Health.RUNNING


def test_failing_requests_are_errors_then_misses_until_recovery(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    run = make_run(1, [4096])
    finished(engine.submit_store(run))
    assert engine.refresh(TIMEOUT_S)
    failing = fail(engine, monkeypatch, "get_range", Failure.UNAVAILABLE)
    for _ in range(3):
        assert finished(engine.submit_load(blank(run))) == [Reason.IO_ERROR]
    stats = engine.stats()
    assert stats.health is Health.MISS_ONLY
    assert "503" in stats.health_reason
    assert engine.lookup(run.keys) == (0, Stop.UNHEALTHY)
    assert engine.contains(run.keys) == [False]
    assert finished(engine.submit_load(blank(run))) == [Reason.MISS]
    assert finished(engine.submit_store(make_run(2, [4096]))) == [Reason.REJECTED]
    failing.clear()
    poll_until(lambda: engine.stats().health is Health.RUNNING)  # by its own probe
    assert finished(engine.submit_load(blank(run))) == [Reason.OK]
    assert engine.object_stats().num_breaker_opened == 1


def test_failed_uploads_are_errors_and_pause_stores_only(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    held = make_run(1, [4096])
    finished(engine.submit_store(held))
    failing = fail(engine, monkeypatch, "put", Failure.UNAVAILABLE)
    run = make_run(2, [4096])
    assert finished(engine.submit_store(run)) == [Reason.IO_ERROR]
    assert finished(engine.submit_store(run)) == [Reason.REJECTED]
    assert engine.lookup(run.keys).stop is Stop.MISS
    assert finished(engine.submit_load(blank(held))) == [Reason.OK]
    failing.clear()
    poll_until(lambda: finished(engine.submit_store(run)) == [Reason.OK])


def test_no_page_is_a_hit_without_its_manifest(
    make_engine: MakeEngine, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    inner = engine._client.put

    def no_manifests(path: str, data: bytes) -> None:
        if "/manifests/" in path:
            raise RequestError(Failure.UNAVAILABLE, "put was not answered in time")
        inner(path, data)

    monkeypatch.setattr(engine._client, "put", no_manifests)
    run = make_run(1, [4096])
    assert finished(engine.submit_store(run)) == [Reason.IO_ERROR]
    assert engine.lookup(run.keys).num_hits == 0
    assert len(paths(engine, "objects")) == 1, "an orphan is left for the collector"


def test_the_budgets_of_a_day_reject_stores(make_engine: MakeEngine, make_run: MakeRun) -> None:
    engine = make_engine(writes_per_day=500_000)  # bursts of a tenth
    assert finished(engine.submit_store(make_run(1, [40_000]))) == [Reason.OK]
    assert finished(engine.submit_store(make_run(2, [40_000]))) == [Reason.REJECTED]
    engine = make_engine(requests_per_day=35)
    results = [finished(engine.submit_store(make_run(seed, [100])))[0] for seed in range(10, 14)]
    assert results == [Reason.OK, Reason.OK, Reason.REJECTED, Reason.REJECTED]


def test_a_directory_that_cannot_be_made_only_misses(
    make_engine: MakeEngine, make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    engine = make_engine(url=(tmp_path / "file" / "store").as_uri())
    poll_until(lambda: engine.stats().health is Health.MISS_ONLY)
    assert finished(engine.submit_store(make_run(1, [10]))) == [Reason.REJECTED]
    (tmp_path / "file").unlink()
    poll_until(lambda: engine.stats().health is Health.RUNNING)
    assert finished(engine.submit_store(make_run(1, [10]))) == [Reason.OK]
    assert (tmp_path / "file" / "store").stat().st_mode & 0o777 == 0o700


def test_closing_is_bounded_while_a_request_hangs(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    engine = make_engine(request_timeout_s=0.2)
    run = make_run(1, [4096])
    finished(engine.submit_store(run))
    gets, puts = Gate(engine, "get_range"), Gate(engine, "put")
    target = blank(run)
    load, store = engine.submit_load(target), engine.submit_store(make_run(2, [4096]))
    assert gets.reached.wait(TIMEOUT_S)
    assert puts.reached.wait(TIMEOUT_S)
    engine.close()
    assert load.done
    assert store.done
    assert store.reasons == [Reason.CANCELLED]
    gets.opened.set()
    puts.opened.set()
    for thread in engine._threads:
        thread.join(TIMEOUT_S)
    assert page_data(target) == page_data(blank(run)), "a buffer was touched after its job"


def test_objects_past_their_time_to_live_are_misses(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    now = [1_000_000.0]
    engine = make_engine(ttl_s=60.0, clocks={"wall_clock": lambda: now[0]})
    old, young = make_run(1, [100]), make_run(2, [100])
    finished(engine.submit_store(old))
    now[0] += 50
    finished(engine.submit_store(young))
    now[0] += 20
    assert engine.refresh(TIMEOUT_S, full=True)
    assert engine.contains([*old.keys, *young.keys]) == [False, True]
    assert engine.refresh(TIMEOUT_S, full=True)
    assert engine.contains([*old.keys, *young.keys]) == [False, True]


def test_a_codec_not_in_the_settings_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="codec zstd, not none"):
        make_engine(codec="zstd")


def test_a_namespace_of_wrong_length_raises(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="a namespace has 3 bytes"):
        make_engine(namespace=b"abc")
    engine = make_engine()
    with pytest.raises(ValueError, match="a namespace has 3 bytes"):
        engine.set_namespace(b"abc")


def test_what_it_asked_for_is_counted(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank
) -> None:
    engine = make_engine()
    run = make_run(1, [4096] * 8)
    finished(engine.submit_store(run))
    finished(engine.submit_load(blank(run)))
    stats = engine.object_stats()
    assert (stats.requests["put"], stats.requests["get"]) == (2, 1)
    assert stats.bytes_in == run.num_bytes
    assert run.num_bytes < stats.bytes_out < run.num_bytes + 2 * MAX_MANIFEST_BYTES
    assert stats.requests_per_gb_out == pytest.approx(2e9 / stats.bytes_out)
    assert stats.requests_per_gb_in > 0
    assert (stats.num_objects, stats.num_objects_stored, stats.breaker) == (1, 1, "running")
    assert stats.last_error == ""
