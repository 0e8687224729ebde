"""Engines over one directory or one memory, closed and checked when the test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from bucket_engines import open_engine

from kit.waiting import TIMEOUT_S, drained
from sglang_tiered.storage.bucket import BucketEngine

if TYPE_CHECKING:
    from pathlib import Path

MakeEngine = Callable[..., BucketEngine]


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    """``make_engine(**settings)``: engines that share what they store. Nothing is looked for
    unless the test says so."""
    made: list[BucketEngine] = []

    def make(**changes: Any) -> BucketEngine:
        own = {"url": f"memory://{tmp_path}", "staging_bytes": 4 << 20, "num_connections": 2}
        made.append(open_engine(**(own | changes)))
        return made[-1]

    yield make
    for engine in made:
        drained(engine, TIMEOUT_S)
        engine.check_integrity()
        engine.close()
        assert not [thread.name for thread in engine._workers._threads if thread.is_alive()]


@pytest.fixture
def a(make_engine: MakeEngine) -> BucketEngine:
    return make_engine()


@pytest.fixture
def b(make_engine: MakeEngine) -> BucketEngine:
    return make_engine()


@pytest.fixture
def c(make_engine: MakeEngine) -> BucketEngine:
    return make_engine()
