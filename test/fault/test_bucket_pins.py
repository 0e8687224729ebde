"""Pins in a bucket: what they keep from cap, age and collectors on every server, and what ends
them."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from bucket_engines import TIMEOUT_S, collect, load, opened, paths, run_of, store
from object_proxy import FaultProxy, status

from kit.waiting import eventually
from sglang_tiered.storage.base import Erasure, PinRefusal, Reason, Run
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.bucket.directory import STAGED
from sglang_tiered.storage.promises import is_true

OK = {Reason.OK}
DAY = 86_400.0


def pinned(engine: BucketEngine, name: str, run: Run, **options: Any) -> None:
    outcome = engine.pin(name, run.keys, **options)
    assert not isinstance(outcome, PinRefusal), outcome.why
    assert is_true(outcome, TIMEOUT_S)


def names(engine: BucketEngine) -> set[str]:
    return {info.name for info in engine.pins()}


def fresh(engine: BucketEngine) -> BucketEngine:
    assert engine.refresh(TIMEOUT_S, full=True)
    return engine


@pytest.mark.parametrize("is_stored_first", [True, False])
def test_a_pin_outlives_cap_and_age_everywhere(url: str, is_stored_first: bool) -> None:
    kept, gone, last = (run_of(number) for number in range(3))
    with opened(url, ttl_s=DAY) as first, opened(url, ttl_s=DAY) as second:
        if is_stored_first:
            assert store(first, kept) == OK
        pinned(first, "a", kept, data=b"note")
        assert store(second, gone) == OK
        assert store(second, last) == OK
        if not is_stored_first:
            assert store(first, kept) == OK
        assert [(i.name, i.num_pages, i.data) for i in first.pins()] == [("a", 4, b"note")]
        size = collect(first).page_bytes // 3
        assert names(fresh(second)) == {"a"}
        assert second.has_pin("a")
        for settings in ({"capacity_bytes": 2 * size}, {"ttl_s": DAY}):
            collect(second, 2 * DAY, **settings)
        assert len(paths(first)) == 4
        later = {"wall_clock": lambda: time.time() + 2 * DAY, "ttl_s": DAY}
        with opened(url, **later) as third:
            for engine in (first, second, third):
                assert load(fresh(engine), kept) == OK
                assert load(engine, gone) == {Reason.MISS}
                engine.check_integrity()
            assert is_true(third.unpin("a"), TIMEOUT_S)
            assert paths(third, "pins") == []
            assert names(fresh(first)) == set()
            collect(first, 2 * DAY, ttl_s=DAY)
            assert load(fresh(third), kept) == {Reason.MISS}


def test_a_pin_beyond_the_share_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path.as_uri(), capacity_bytes=80_000) as engine:
        runs = [run_of(number) for number in range(4)]
        for run in runs:
            assert store(engine, run) == OK
        assert engine.pin_bound_bytes == 40_000
        pinned(engine, "a", runs[0])
        pinned(engine, "b", runs[1])
        pinned(engine, "b", Run(runs[1].keys + runs[0].keys, runs[1].pages + runs[0].pages))
        held = engine.pinned_bytes
        assert 20_000 < held < 40_000
        refusal = engine.pin("c", runs[2].keys + runs[3].keys)
        assert isinstance(refusal, PinRefusal)
        assert (refusal.pinned_bytes, refusal.bound_bytes) == (held, 40_000)
        assert refusal.asked_bytes + held > 40_000
        assert str(refusal.asked_bytes) in refusal.why
        assert names(engine) == {"a", "b"}
        assert is_true(engine.unpin("b"), TIMEOUT_S)
        pinned(engine, "c", runs[2])


def test_a_pin_expires_everywhere(tmp_path: Path) -> None:
    url, now = tmp_path.as_uri(), [time.time()]
    run = run_of(1)
    clock = {"wall_clock": lambda: now[0]}
    with opened(url, **clock) as first, opened(url, **clock) as second:
        assert store(first, run) == OK
        pinned(first, "a", run, until_s=now[0] + 100)
        assert fresh(second).has_pin("a")
        now[0] += 101
        assert not first.has_pin("a")
        assert names(second) == names(first) == set()
        collect(second, 2 * DAY, ttl_s=DAY)
        assert paths(first, "pins") == paths(first) == []


def test_the_last_word_on_a_name_counts(tmp_path: Path) -> None:
    """Of whichever server, and whatever it knew of the pin."""
    url, one, two = tmp_path.as_uri(), run_of(1), run_of(2)
    with opened(url) as first, opened(url) as second:
        assert store(first, one, two) == OK
        pinned(first, "a", one)
        pinned(fresh(second), "a", two)
        assert len(paths(first, "pins")) == 1
        with opened(url) as third:
            for engine in (first, second, third):
                (info,) = fresh(engine).pins()
                assert engine._state.pins.book.get("a").keys == two.keys
                assert info.num_pages == 4
        assert is_true(first.unpin("a"), TIMEOUT_S)
        pinned(fresh(second), "a", one)
        pinned(first, "b", one)
        assert is_true(second.unpin("b"), TIMEOUT_S), "it was not known here"
        assert names(fresh(first)) == {"a"}


def test_forgetting_a_page_leaves_the_rest_pinned(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    run, other = run_of(1), run_of(2)
    with opened(url) as first, opened(url) as second:
        assert store(first, run) == store(first, other) == OK
        pinned(first, "a", run)
        pinned(first, "b", other)
        assert names(fresh(second)) == {"a", "b"}
        assert is_true(second.erase(Erasure.of([*run.keys[:1], *other.keys])), TIMEOUT_S)
        eventually(lambda: len(paths(first, "pins")) == 1, "one keeps nothing any more")
        with opened(url) as third:
            for engine in (first, second, third):
                assert names(fresh(engine)) == {"a"}
                assert engine._state.pins.book.get("a").keys == run.keys[1:]
        assert store(second, Run(run.keys[:1], run.pages[:1])) == OK
        collect(first, 2 * DAY, ttl_s=DAY)
        with opened(url) as fourth:
            assert fourth.contains(run.keys) == [False, True, True, True]


def test_a_pin_holds_while_the_bucket_refuses(s3_url: str, proxy: FaultProxy) -> None:
    run = run_of(1)
    with opened(s3_url) as first, opened(s3_url) as second:
        assert store(first, run) == OK
        proxy.add("put", "/pins/", status(503))
        begun = first.pin("a", run.keys)
        assert not is_true(_future(begun), TIMEOUT_S)
        assert first.has_pin("a")
        assert first.refresh(TIMEOUT_S), "what is refused keeps nothing else waiting"
        assert names(fresh(second)) == set()
        proxy.clear()
        eventually(lambda: first.refresh(TIMEOUT_S) and names(fresh(second)) == {"a"})


def test_a_listing_of_half_a_pin_drops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows the file before it is renamed; had its writer died there, none could unpin it."""
    url, replace, seen = tmp_path.as_uri(), os.replace, list[set[str]]()
    with opened(url) as first, opened(url) as second:
        assert store(first, run_of(1)) == OK

        def look(source: Any, target: Any, **named: Any) -> None:
            if STAGED in str(source):
                seen.append(names(fresh(second)))
            replace(source, target, **named)

        monkeypatch.setattr(os, "replace", look)
        pinned(first, "a", run_of(1))
        assert seen == [set()], "of which nobody was told"
        for _ in range(2):
            assert names(fresh(second)) == {"a"}


def test_a_damaged_pin_is_left_alone(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    with opened(url) as first:
        assert store(first, run_of(1)) == OK
        pinned(first, "a", run_of(1))
        (path,) = paths(first, "pins")
        first._requests.put(path, b"nonsense")
        with opened(url) as second:
            assert names(second) == set()
            assert collect(second).num_unreadable == 1
            assert paths(second, "pins") == [path]


def _future(outcome: Future[bool] | PinRefusal) -> Future[bool]:
    assert not isinstance(outcome, PinRefusal), outcome.why
    return outcome
