"""Page servers in processes of their own that are killed or stopped, and clients that wait."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from page_peers import PATIENT, ServerProcess, Wanted, page_client

from sglang_tiered.sharing.pages.landing import PageOutcome

pytestmark = pytest.mark.timeout(60)

MiB = 1 << 20
SMALL_STEPS = replace(PATIENT, request_bytes=MiB, max_requests=2)
HASTY = replace(SMALL_STEPS, answer_timeout_s=1.0)


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
        process.thaw()
        # The same connection goes on, and what it owed from before is passed over.
        after = Wanted(client, process.port, process.pages)
        assert set(after.wait()) == {PageOutcome.OK}
        assert after.is_right
        assert wanted.is_untouched
        assert client.stats.num_links_lost == 0
