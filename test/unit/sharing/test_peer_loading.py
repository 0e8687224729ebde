"""Loads from other servers: who is asked next, and who is left alone."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from page_peers import (
    DEADLINE_S,
    HOST,
    NAMESPACE,
    StrangeServer,
    make_pages,
    page_client,
    page_server,
)

from server_process import free_port
from sglang_tiered.sharing.mirror import Peer
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.peer_tier import PeerLoader
from sglang_tiered.storage.base import Reason, Run

PAGES = make_pages(1, [4096, 5000])


def blank() -> Run:
    return Run(tuple(PAGES), tuple((memoryview(bytearray(len(p))),) for p in PAGES.values()))


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_holder_that_failed_is_not_asked_again(is_silent: bool, is_alone: bool) -> None:
    """Though the mirror finds it at once. Silence leaves no time to ask another."""
    told: list[tuple[str, str]] = []
    with StrangeServer() as liar, page_server(PAGES) as (other, _), page_client() as client:
        first, second = (Peer(str(n), f"tcp://{HOST}:{n}") for n in (liar.port, other.port))
        mirror = SimpleNamespace(
            find=lambda keys: [first if is_alone or not told else second] * len(keys),
            lacks=lambda server, keys: told.append((server, "lacks")),
            avoid=lambda server, seconds: told.append((server, "avoid")),
        )
        loader = PeerLoader(mirror, client, time.monotonic)  # type: ignore[arg-type]
        job = loader.submit(blank(), NAMESPACE, deadline_s=0.2 if is_silent else None)
        asked = liar.hear()
        if not is_silent:
            liar.say(messages.Found(asked.number, [None] * 2))
        assert job.wait(DEADLINE_S)
        assert told == [(first.server, "avoid" if is_silent else "lacks")]
        served = Reason.MISS if is_alone else Reason.OK
        assert job.reasons == [Reason.IO_ERROR if is_silent else served] * 2
        assert other.stats.num_requests == (not is_silent and not is_alone)


def test_lost_holder_is_avoided_with_growing_pauses() -> None:
    gone, pauses = Peer("gone", f"tcp://{HOST}:{free_port()}"), list[float]()
    mirror = SimpleNamespace(
        find=lambda keys: [gone] * len(keys),
        avoid=lambda server, seconds: pauses.append(seconds),
    )
    with page_client() as client:
        loader = PeerLoader(mirror, client, time.monotonic)  # type: ignore[arg-type]
        for _ in range(9):
            job = loader.submit(blank(), NAMESPACE, deadline_s=None)
            assert job.wait(DEADLINE_S) and job.reasons == [Reason.IO_ERROR] * 2
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
