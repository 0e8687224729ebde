"""Page servers in processes of their own that are killed or stopped, and clients that wait."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
from page_peers import PATIENT, ServerProcess, Wanted, page_client

from kit.waiting import eventually
from sglang_tiered.sharing.pages.landing import PageOutcome

pytestmark = pytest.mark.timeout(60)

MiB = 1 << 20
SMALL_STEPS = replace(PATIENT, request_bytes=MiB, max_requests=2)
HASTY = replace(SMALL_STEPS, answer_timeout_s=1.0)


def test_a_server_killed_midway_ends_the_fetch() -> None:
    with ServerProcess(1, MiB, 48) as process, page_client(SMALL_STEPS) as client:
        wanted = Wanted(client, process.port, process.pages, deadline_s=None)
        eventually(lambda: client.stats.num_requests > 8)
        process.strike()
        begun = time.monotonic()
        outcomes = wanted.wait()
        assert time.monotonic() - begun < 10.0
        assert set(outcomes) <= {PageOutcome.OK, PageOutcome.LOST}
        for (key, page), outcome in zip(process.pages.items(), outcomes, strict=True):
            if outcome is PageOutcome.OK:
                assert bytes(wanted.buffers[key]) == page
        assert client.num_links == 0
        again = Wanted(client, process.port, process.pages, deadline_s=None)
        assert again.wait() == [PageOutcome.LOST] * 48
        assert again.is_untouched


def test_a_server_stopped_for_good_is_given_up() -> None:
    with ServerProcess(3, MiB, 4) as process, page_client(HASTY) as client:
        assert set(Wanted(client, process.port, process.pages).wait()) == {PageOutcome.OK}
        process.freeze()
        wanted = Wanted(client, process.port, process.pages, deadline_s=None)
        assert wanted.wait() == [PageOutcome.LOST] * 4
        assert client.num_links == 0


def test_a_server_stopped_too_long_lands_nothing() -> None:
    with ServerProcess(2, MiB, 32) as process, page_client(SMALL_STEPS) as client:
        assert set(Wanted(client, process.port, process.pages).wait()) == {PageOutcome.OK}
        process.freeze()
        begun = time.monotonic()
        wanted = Wanted(client, process.port, process.pages, deadline_s=0.3)
        assert wanted.wait() == [PageOutcome.LATE] * 32
        assert 0.3 <= time.monotonic() - begun < 10.0
        os.kill(process.pid, signal.SIGCONT)
        # The same connection goes on, and what it owed from before is passed over.
        after = Wanted(client, process.port, process.pages)
        assert set(after.wait()) == {PageOutcome.OK}
        assert after.is_right
        assert wanted.is_untouched
        assert client.stats.num_links_lost == 0
