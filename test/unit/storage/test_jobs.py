"""What tiers wait for: loads over several holders, futures, which end exactly once and at the
latest when their tier is closed, and ever longer pauses. Their users test the rest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kit.clock import Clock
from kit.runs import make_run
from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.base import Job, JobKind, Reason
from sglang_tiered.storage.jobs import LoadPart, SplitLoad
from sglang_tiered.storage.promises import Promises, keep, promise

RUN = make_run(1, [100] * 3)
OK, MISS = Reason.OK, Reason.MISS


class Split:
    """A load of which the first of two holders has two pages, and the second all."""

    def __init__(self) -> None:
        self.clock = Clock(10.0)
        self.parts: list[LoadPart[str]] = []
        self.over: list[Job] = []
        job, read = Job(JobKind.LOAD, RUN), lambda part, _: self.parts.append(part)
        self.load = SplitLoad(job, self.clock, 11.0, self.find, read, self.over.append)
        self.load.begin()

    def find(self, keys: Sequence[bytes], failed: frozenset[str]) -> list[str | None]:
        held = {key: ["first", "second"][key == RUN.keys[2] :] for key in keys}
        return [next((each for each in held[key] if each not in failed), None) for key in keys]


@pytest.mark.parametrize(("now", "num_asked"), [(10.0, 1), (10.999, 0), (11.0, 0)])
def test_nobody_is_asked_again_too_late(now: float, num_asked: int) -> None:
    split = Split()
    split.clock.now = now
    for part, reason in zip(split.parts[:], (MISS, OK), strict=True):
        assert not split.load.job.done, "a part is under way"
        split.load.end(part, [reason] * part.run.num_pages)
    assert [part.run.keys for part in split.parts[2:]] == [RUN.keys[:2]] * num_asked
    assert split.load.job.done is not bool(num_asked)


def test_what_raises_still_ends_the_load() -> None:
    split = Split()
    first, second = split.parts
    split.load.end(first, [OK] * 2, lambda: 1 // 0)  # type: ignore[arg-type]
    split.load.end(second, [OK])
    assert split.load.job.reasons == [OK] * 3 and split.load.job.done
    assert split.over == [split.load.job]
    job, over = Job(JobKind.LOAD, RUN), list[Job]()
    read = lambda part, left_s: 1 // 0  # noqa: E731
    SplitLoad(job, Clock(10.0), None, split.find, read, over.append).begin()
    assert job.done and job.reasons == [Reason.IO_ERROR] * 3 and over == [job]


def test_who_waits_cannot_cancel_for_others() -> None:
    future = promise()
    assert not future.cancel()
    keep(future, True)
    keep(future, False)  # of a thread that comes late
    assert future.result(0.0) is True


def test_closing_ends_what_comes_later() -> None:
    promises = Promises()
    promises.close()
    assert promises.make().result(0.0) is False


def test_a_pause_doubles_to_a_minute_then_resets() -> None:
    """Failures within a pause are one incident."""
    clock = Clock()
    backoff, pauses = Backoff(clock), []
    for _ in range(9):
        for _ in range(3):
            backoff.fail()
        start = clock.now
        while not backoff.is_over:
            clock.now += 0.5
        pauses.append(clock.now - start)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    backoff.succeed()
    backoff.fail()
    assert backoff.wait_s == 1.0
