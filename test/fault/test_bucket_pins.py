"""Pins in a bucket: what they keep from cap, age and collectors on every server, and what ends
them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from bucket_engines import TIMEOUT_S, collect, load, opened, paths, run_of, store

from sglang_tiered.storage.base import PinRefusal, Reason, Run
from sglang_tiered.storage.bucket import BucketEngine
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
    kept, gone = run_of(0), run_of(1, num_pages=8)
    with opened(url, ttl_s=DAY) as first, opened(url, ttl_s=DAY) as second:
        if is_stored_first:
            assert store(first, kept) == OK
        pinned(first, "a", kept, data=b"note")
        assert store(second, gone) == OK
        if not is_stored_first:
            assert store(first, kept) == OK
        assert [(i.name, i.num_pages, i.data) for i in first.pins()] == [("a", 4, b"note")]
        size = collect(first).page_bytes * 2 // 3
        assert names(fresh(second)) == {"a"}
        for settings in ({"capacity_bytes": size}, {"ttl_s": DAY}):
            collect(second, 2 * DAY, **settings)
        assert len(paths(first)) == 4
        later = {"wall_clock": lambda: time.time() + 2 * DAY, "ttl_s": DAY}
        with opened(url, **later) as third:
            for engine in (first, second, third):
                assert load(fresh(engine), kept) == OK
                assert load(engine, gone) == {Reason.MISS}
            assert is_true(third.unpin("a"), TIMEOUT_S)
            assert names(fresh(first)) == set()
            collect(first, 2 * DAY, ttl_s=DAY)
            assert load(fresh(third), kept) == {Reason.MISS}


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
