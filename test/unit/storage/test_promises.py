"""Futures of tiers end exactly once, and at the latest when their tier is closed."""

from __future__ import annotations

from sglang_tiered.storage.base import Job, JobKind, Run
from sglang_tiered.storage.promises import Promises, all_true, is_true, keep, promise


def test_the_whole_ends_with_its_last_part() -> None:
    job = Job(JobKind.LOAD, Run((), ()))
    first, second = promise(), promise()
    whole = all_true([first, second], [job])
    keep(second, True)
    job.finish()
    assert not is_true(whole, 0.0)
    assert not whole.done()
    keep(first, True)
    assert whole.result(0.0)


def test_who_waits_cannot_cancel_for_others() -> None:
    future = promise()
    assert not future.cancel()
    keep(future, True)
    keep(future, False)  # of a thread that comes late
    assert future.result(0.0) is True


def test_closing_ends_what_is_left_and_what_comes() -> None:
    promises = Promises()
    kept, left = promises.make(), promises.make()
    whole = promises.watch(all_true([promise()]))  # of a part that hangs
    keep(kept, True)
    promises.close()
    assert [future.result(0.0) for future in (kept, left, whole)] == [True, False, False]
    assert promises.make().result(0.0) is False
