"""Who may touch a load's buffers, and who finishes it: exactly one, after the last touch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Job, JobKind
from sglang_tiered.storage.bucket.names import Layout
from sglang_tiered.storage.bucket.tickets import LoadTicket

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.runs import MakeRun

TIMEOUT_S = 20.0


def ticket(make_run: MakeRun, num_pages: int) -> LoadTicket:
    return LoadTicket(Job(JobKind.LOAD, make_run(1, [10])), Layout(b"n" * 32), num_pages, None)


def test_the_last_page_finishes(make_run: MakeRun) -> None:
    load = ticket(make_run, 3)
    assert [load.settle_page() for _ in range(3)] == [False, False, True]
    assert not load.expire()


def test_an_expired_load_is_neither_touched_nor_finished(make_run: MakeRun) -> None:
    load = ticket(make_run, 1)
    with load.touching() as allowed:
        assert allowed
    assert load.expire()
    with load.touching() as allowed:
        assert not allowed
    assert not load.settle_page()
    assert not load.expire()


def test_a_deadline_waits_for_a_running_copy(make_run: MakeRun) -> None:
    load = ticket(make_run, 1)
    expired: list[bool] = []
    thread = threading.Thread(target=lambda: expired.append(load.expire()))
    with load.touching():
        thread.start()
        while load.is_open:
            pass
        assert not expired, "the buffers were given back under a copy"
    thread.join(TIMEOUT_S)
    assert expired == [True]


def test_many_pages_and_a_deadline_finish_once(make_run: MakeRun) -> None:
    for _ in range(50):
        load = ticket(make_run, 4)
        told: list[bool] = []
        ends = [load.settle_page] * 4 + [load.expire]

        def end(how: Callable[[], bool], into: list[bool] = told) -> None:
            into.append(how())

        threads = [threading.Thread(target=end, args=(how,)) for how in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert told.count(True) == 1
