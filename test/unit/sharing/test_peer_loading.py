"""Loads from other servers: who is asked next, and who is left alone."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from page_peers import (
    DEADLINE_S,
    HOST,
    NAMESPACE,
    PATIENT,
    Pages,
    StrangeServer,
    make_pages,
    page_client,
    page_server,
)

from server_process import free_port
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.sharing.peer_tier import PeerLoader
from sglang_tiered.storage.base import Reason, Run

PAGES = make_pages(1, [4096, 5000])


def at(server: StrangeServer | PageServer) -> str:
    return f"tcp://{HOST}:{server.port}"


def blank(pages: Pages = PAGES) -> Run:
    """Room for the pages."""
    return Run(tuple(pages), tuple((memoryview(bytearray(len(p))),) for p in pages.values()))


def told_to_avoid(pauses: list[float], *holders: str) -> Any:
    """A mirror that finds all pages at the first of these that is asked for."""
    return SimpleNamespace(
        find=lambda keys, without: [
            next((each for each in holders if each not in without), None) for _ in keys
        ],
        avoid=lambda address, seconds: pauses.append(seconds),
    )


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_holder_that_failed_is_not_asked_again(is_silent: bool, is_alone: bool) -> None:
    """Silence leaves no time to ask another."""
    avoided: list[str] = []
    with StrangeServer() as liar, page_server(PAGES) as (other, _), page_client() as client:
        first, second = (at(each) for each in (liar, other))
        holders = [first] if is_alone else [first, second]
        mirror = told_to_avoid([], *holders)
        mirror.avoid = lambda address, _: avoided.append(address)
        loader = PeerLoader(lambda: mirror, client, time.monotonic)
        job = loader.submit(blank(), NAMESPACE, deadline_s=0.2 if is_silent else None)
        asked = liar.hear()
        if not is_silent:
            liar.say(messages.Found(asked.number, [None] * 2))
        assert job.wait(DEADLINE_S)
        assert avoided == [first] * is_silent
        served = Reason.MISS if is_alone else Reason.OK
        assert job.reasons == [Reason.IO_ERROR if is_silent else served] * 2
        assert other.num_requests == (not is_silent and not is_alone)


def test_lost_holder_is_avoided_with_growing_pauses() -> None:
    """However many requests were lost with it."""
    gone, pauses, now = f"tcp://{HOST}:{free_port()}", list[float](), [100.0]
    with page_client(replace(PATIENT, request_bytes=1)) as client:
        loader = PeerLoader(lambda: told_to_avoid(pauses, gone), client, lambda: now[0])
        for _ in range(9):
            job = loader.submit(blank(), NAMESPACE, deadline_s=None)
            assert job.wait(DEADLINE_S) and job.reasons == [Reason.IO_ERROR] * 2
            now[0] += 60.0
    assert pauses[::2] == pauses[1::2] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_more_pages_than_a_message_names_are_loaded() -> None:
    pages = make_pages(2, [1] * (messages.MAX_REQUEST_PAGES + 1))
    with page_server(pages) as (server, _), page_client() as client:
        loader = PeerLoader(lambda: told_to_avoid([], at(server)), client, time.monotonic)
        job = loader.submit(blank(pages), NAMESPACE, deadline_s=None)
        assert job.wait(DEADLINE_S) and job.reasons == [Reason.OK] * len(pages)


def test_damaged_pages_cost_a_good_holder_little() -> None:
    """Whoever gave whole pages since is avoided as shortly as at first."""
    pauses, now = list[float](), [100.0]
    with StrangeServer() as server, page_client() as client:
        loader = PeerLoader(lambda: told_to_avoid(pauses, at(server)), client, lambda: now[0])
        damaged = {key: bytes(len(page)) for key, page in PAGES.items()}
        for is_whole in (False, False, True, False):
            job = loader.submit(blank(), NAMESPACE, deadline_s=None)
            asked = server.hear()
            if is_whole:
                server.answer(asked, PAGES)
            else:
                server.say(messages.Found(asked.number, [1, 2]), *damaged.values())
            reason = Reason.OK if is_whole else Reason.CORRUPT
            assert job.wait(DEADLINE_S) and job.reasons == [reason] * 2
            now[0] += 60.0
    assert pauses == [0.5, 1.0, 0.5]


@pytest.mark.parametrize("is_sent", [True, False])
def test_late_pages_blame_nobody_who_answers(is_sent: bool) -> None:
    """Others, meanwhile; nor who was not asked yet."""
    pauses = list[float]()
    wanted = replace(PATIENT, max_requests=8 if is_sent else 1)
    with StrangeServer() as server, page_client(wanted) as client:
        loader = PeerLoader(lambda: told_to_avoid(pauses, at(server)), client, time.monotonic)
        loader.submit(blank(), NAMESPACE, deadline_s=None)
        first = server.hear()
        late = loader.submit(blank(), NAMESPACE, deadline_s=1.0 if is_sent else 0.1)
        if is_sent:
            server.hear()
            server.answer(first, PAGES)
        assert late.wait(DEADLINE_S) and late.reasons == [Reason.IO_ERROR] * len(PAGES)
        if not is_sent:
            server.answer(first, PAGES)
        assert pauses == []
