"""Who may touch a load's buffers, and who finishes it: exactly one, after the last touch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.request_hooks import Gate
from kit.runs import blank, make_run
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.storage.base import Erasure, Reason, Run
from sglang_tiered.storage.promises import is_true


def test_a_deadline_waits_for_a_running_copy(make_engine: Any, tmp_path: Path) -> None:
    """And what came to its end meanwhile is not said to have arrived."""
    engine, run = make_engine(url=tmp_path.as_uri()), make_run(1, [4096])
    finished(engine.submit_store(run))
    gate, target = Gate(engine, "read_cached"), blank(run)
    job = engine.submit_load(target, deadline_s=0.01)
    assert gate.reached.wait(TIMEOUT_S)
    (load,) = engine._state.open_loads
    eventually(lambda: not load.is_open, "its deadline passed")
    assert not job.done, "the buffers were given back under a copy"
    gate.opened.set()
    assert finished(job) == [Reason.IO_ERROR]
    assert bytes(target.pages[0][0]) == bytes(run.pages[0][0])


@pytest.mark.parametrize("url", ["memory", "directory"])
def test_many_pages_and_a_deadline_finish_once(make_engine: Any, tmp_path: Path, url: str) -> None:
    """However many of them one thread takes."""
    place = {} if url == "memory" else {"url": tmp_path.as_uri()}
    engine, run = make_engine(num_connections=4, **place), make_run(1, [100] * 40)
    finished(engine.submit_store(run))
    seen: set[Reason] = set()
    for number in range(100):
        job = engine.submit_load(blank(run), deadline_s=number * 2e-5)
        seen.update(finished(job))  # a second end of a job is an assertion of it
    assert seen == {Reason.OK, Reason.IO_ERROR}
    engine.check_integrity()


def test_true_waits_for_loads_of_what_was_erased(make_engine: Any) -> None:
    """A load names no tenant, so any may be of one."""
    engine, run = make_engine(), make_run(1, [100])
    finished(engine.submit_store(Run(run.keys, run.pages, b"a" * 16)))
    gate = Gate(engine, "get")
    job = engine.submit_load(blank(run))
    assert gate.reached.wait(TIMEOUT_S)
    begun = engine.erase(Erasure(tenant=b"a" * 16))
    eventually(lambda: not engine._state.orders, "it is durable")
    assert not begun.done()
    gate.opened.set()
    assert is_true(begun, TIMEOUT_S)
    assert job.done
