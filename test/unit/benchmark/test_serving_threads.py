"""Whose processor time it was, and when a turn counts as stored."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace

from serving_bench.processor_time import (
    TICKS_PER_S,
    between,
    describe_shares,
    naming_threads,
    parse_stat,
    take,
)
from serving_bench.stored_soon import Turn, Watch


def test_a_thread_name_with_brackets_is_read_whole() -> None:
    fields = "S 1 2 3 4 5 6 7 8 9 10 250 50 0 0"
    assert parse_stat(f"41 (a (b) c) {fields}\n") == ("a (b) c", 300 / TICKS_PER_S)


def test_time_of_ended_threads_is_not_lost() -> None:
    before = {(1, 0): ("s: ended", 5.0), (1, 1): ("s", 3.0), (1, 2): ("s: writer", 2.0)}
    after = {
        (1, 0): ("s: ended", 9.0),
        (1, 1): ("s", 4.0),
        (1, 3): ("s: reader", 1.0),
        (1, 4): ("s: reader", 0.5),
    }
    assert between(before, after) == {"s": 1.0, "s: reader": 1.5, "s: ended": 1.5}


def test_small_shares_do_not_fill_a_note() -> None:
    assert describe_shares({"a": 1.0, "b": 2.98, "c": 0.02}) == "b 74.5%, a 25.0%"


def test_a_server_thread_tells_the_kernel_its_name() -> None:
    program = (
        "import threading, sys\n"
        "def backup_thread():\n"
        "    print('ready\\n', end='', flush=True)\n"
        "    sys.stdin.read()\n"
        "threads = [threading.Thread(target=backup_thread),\n"
        "           threading.Thread(target=sys.stdin.read, name='tier-reader-0')]\n"
        "for thread in threads: thread.start()\n"
        "print('started\\n', end='', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **naming_threads()},
    ) as process:
        assert process.stdout is not None
        assert {process.stdout.readline(), process.stdout.readline()} == {b"ready\n", b"started\n"}
        labels = {label for label, _ in take(process.pid).values()}
        process.communicate(timeout=60)
    assert labels == {"http", "http: ended", "http: backup_thread", "http: tier-reader"}


def test_a_turn_never_seen_stored_ages_on() -> None:
    stored = {100: 0, 200: 128}

    def num_stored(tokens: Sequence[int]) -> int:
        return stored[len(tokens)]

    now = SimpleNamespace(s=10.0)
    watch = Watch(num_stored, clock=lambda: now.s)
    # Of 200 tokens three pages are whole; the last token of an answer was never computed.
    watch.add([Turn("a", (1,) * 100, 8.0), Turn("b", (1,) * 200, 9.0)])
    watch.poll()
    assert watch.all_ages_s(12.0) == [4.0, 3.0]
    now.s, stored[200] = 11.5, 192
    watch.poll()
    assert watch.all_ages_s(41.0) == [2.5, 33.0]
    assert Turn("c", (1,) * 193, 0.0).num_kept == 192
    assert Turn("d", (1,) * 192, 0.0).num_kept == 128
