"""``kill -9`` on real processes that store into a directory and over a real S3 API: what they said
was durable is a hit for the next server, and nothing half done is served."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path
from urllib.parse import urlsplit

from bucket_child import BucketChild, child_run
from bucket_engines import TIMEOUT_S, is_held, load, opened, run_of, store

from kit.runs import NAMESPACE
from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.bucket.collect import Collector, CollectorSettings
from sglang_tiered.storage.bucket.directory import STAGED
from sglang_tiered.storage.bucket.requests import Requests

OK = {Reason.OK}


def kill_writers(url: str, *, seed: int, num_kills: int, up_to: int) -> list[int]:
    """Kill a writer after a seeded number of acknowledgements, over and over, and expect of a
    fresh engine every run that any of them acknowledged."""
    source = random.Random(seed)
    acknowledged: list[int] = []
    first = 0
    for _ in range(num_kills):
        with BucketChild(url, first) as child:
            assert child.line() == "open"
            lines = [child.line() for _ in range(source.randint(1, up_to))]
            lines += child.kill()
        numbers = [int(line.removeprefix("stored ")) for line in lines]
        acknowledged += numbers
        with opened(url) as engine:
            for number in acknowledged:
                run = child_run(number)
                assert is_held(engine, run), f"run {number} is lost"
                assert load(engine, run) == OK
            for number in range(max(numbers) + 1, max(numbers) + 10):
                load(engine, child_run(number))  # under way at the end: whole or not at all
            engine.check_integrity()
        first = max(numbers) + 100
    return acknowledged


def test_no_kill_loses_acknowledged_pages(url: str) -> None:
    assert len(kill_writers(url, seed=0, num_kills=3, up_to=15)) > 6
    if not url.startswith("file"):
        return
    # What the dead left behind is collected, and what they stored stays.
    place, requests = Path(urlsplit(url).path), Requests(url)
    (place / "v2" / NAMESPACE.hex() / "pages" / f"left{STAGED}1.1").write_bytes(b"half")
    kept = {path for path in place.rglob("pages/*/*") if STAGED not in path.name}
    Collector(requests, CollectorSettings(), clock=lambda: 4e9).run_once(NAMESPACE)
    assert set(place.rglob("pages/*/*")) == kept
    assert not list(place.rglob(f"*{STAGED}*"))


def test_killed_writers_and_collectors_leave_the_bucket_working(tmp_path: Path) -> None:
    """Three writers and two collectors with a small cap, beside a reader here;
    then all of them are killed. Pages may go at any time, and what is served is right."""
    url, firsts, num_steps = tmp_path.as_uri(), (0, 10_000, 20_000), 30
    with contextlib.ExitStack() as held:
        writers = [held.enter_context(BucketChild(url, first, "paced")) for first in firsts]
        collectors = [held.enter_context(BucketChild(url, "collect")) for _ in range(2)]
        for child in (*writers, *collectors):
            assert child.line() == "open"
        reader = held.enter_context(opened(url, refresh_s=0.05))
        step = num_served = 0
        # On a busy machine the writers may have stored nothing before the last step.
        while step < num_steps or not num_served:
            if step < num_steps:
                for child in writers:
                    child.go_on()
                step += 1
                deadline = time.monotonic() + TIMEOUT_S
            assert time.monotonic() < deadline, "nothing was ever served"
            assert reader.refresh(TIMEOUT_S)
            known = [
                run
                for first in firsts
                for run in map(child_run, range(first + max(step - 20, 0), first + step))
                if is_held(reader, run)
            ]
            num_served += sum(load(reader, run) == OK for run in known)
        reader.check_integrity()
        # On a busy machine the writers may still be at it, and not have filled the cap before.
        deadline = time.monotonic() + TIMEOUT_S
        while all(child.line() == "collected 0" for child in collectors):
            assert time.monotonic() < deadline, "nothing was ever collected"
    with opened(url) as fresh:
        assert store(fresh, run_of(1_000_000)) <= {Reason.OK, Reason.DUPLICATE}
        assert load(fresh, run_of(1_000_000)) == OK
