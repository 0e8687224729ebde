"""Loads over two holders: who is asked, who is asked next, and what is learnt of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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

from kit.waiting import eventually
from sglang_tiered.sharing.mirror import Peer
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.client import PageClient
from sglang_tiered.sharing.peer_loading import PeerLoader
from sglang_tiered.storage.base import Job, Reason, Run

pytestmark = pytest.mark.timeout(60)

PAGES = make_pages(1, [4096, 5000, 100, 70_000])
KEYS = list(PAGES)


class Holders:
    """Who holds what, as ``Mirror`` tells it: the first that is neither avoided nor lacks the page,
    unless they are told of in vain."""

    def __init__(self, *peers: tuple[str, int]) -> None:
        self.peers = [Peer(name, f"tcp://{HOST}:{port}") for name, port in peers]
        self.hears = True
        self.lacking: set[tuple[str, bytes]] = set()
        self.avoided: list[tuple[str, float]] = []

    def find(self, keys: Sequence[bytes]) -> list[Peer | None]:
        return [self._find(key) for key in keys]

    def _find(self, key: bytes) -> Peer | None:
        away = {name for name, _ in self.avoided} if self.hears else set()
        lacking = self.lacking if self.hears else set()
        held = (peer for peer in self.peers if (peer.server, key) not in lacking)
        return next((peer for peer in held if peer.server not in away), None)

    def lacks(self, server: str, keys: Sequence[bytes]) -> None:
        self.lacking |= {(server, key) for key in keys}

    def avoid(self, server: str, seconds: float) -> None:
        self.avoided.append((server, seconds))


def run_of(pages: dict[bytes, bytes]) -> Run:
    buffers = (memoryview(bytearray(b"\xa5" * len(page))) for page in pages.values())
    return Run(tuple(pages), tuple((buffer,) for buffer in buffers))


def loader(holders: Holders, client: PageClient) -> PeerLoader:
    return PeerLoader(holders, client, time.monotonic)  # type: ignore[arg-type]


def load(loader: PeerLoader, run: Run, deadline_s: float | None = DEADLINE_S) -> Job:
    job = loader.submit(run, NAMESPACE, deadline_s=deadline_s)
    assert job.wait(DEADLINE_S)
    assert not loader.num_inflight
    return job


def is_right(run: Run) -> bool:
    return [bytes(page[0]) for page in run.pages] == [PAGES[key] for key in run.keys]


@pytest.fixture
def liar() -> Iterator[StrangeServer]:
    with StrangeServer() as server:
        yield server


def damaged(liar: StrangeServer, asked: messages.Fetch) -> None:
    liar.answer(messages.Fetch(asked.number, bytes(32), asked.keys, asked.lengths, 1), PAGES)


ANSWERS: dict[str, tuple[Callable[[StrangeServer, Any], None], Reason, float | None]] = {
    "missing": (
        lambda liar, asked: liar.say(messages.Found(asked.number, [None] * 4)),
        Reason.MISS,
        None,
    ),
    "damaged": (damaged, Reason.CORRUPT, None),
    "busy": (lambda liar, asked: liar.say(messages.Busy(asked.number)), Reason.MISS, 0.2),
    "garbage": (lambda liar, _: liar.send(b"garbage"), Reason.IO_ERROR, 0.5),
}


@pytest.mark.parametrize("has_second", [True, False])
@pytest.mark.parametrize("answer", ANSWERS)
def test_another_holder_is_asked_for_what_failed(
    liar: StrangeServer, answer: str, has_second: bool
) -> None:
    """Not the same again, even where the mirror finds it at once."""
    say, reason, avoided_s = ANSWERS[answer]
    with page_server(PAGES) as (other, _), page_client() as client:
        peers = [("liar", liar.port), ("other", other.port)]
        holders = Holders(*peers[: 1 + has_second])
        holders.hears = has_second
        run, loads = run_of(PAGES), loader(holders, client)
        job = loads.submit(run, NAMESPACE, deadline_s=None)
        say(liar, liar.hear())
        assert job.wait(DEADLINE_S)
        assert job.reasons == [Reason.OK if has_second else reason] * 4
        assert is_right(run) or not has_second
        assert loads.num_recovered == 4 * has_second
        assert holders.avoided == ([] if avoided_s is None else [("liar", avoided_s)])
        assert holders.lacking == ({("liar", key) for key in KEYS} if avoided_s is None else set())


def test_silent_holder_is_avoided_without_second_try(liar: StrangeServer) -> None:
    with page_server(PAGES) as (other, _), page_client() as client:
        holders = Holders(("mute", liar.port), ("other", other.port))
        begun = time.monotonic()
        run = run_of(PAGES)
        job = load(loader(holders, client), run, deadline_s=0.2)
        assert 0.2 <= time.monotonic() - begun < 10.0
        assert job.reasons == [Reason.IO_ERROR] * 4
        assert [name for name, _ in holders.avoided] == ["mute"]
        assert other.stats.num_requests == 0
        before = [bytes(page[0]) for page in run.pages]
        liar.answer(liar.hear(), PAGES)
        eventually(lambda: client.stats.num_overdue == 1)
        assert [bytes(page[0]) for page in run.pages] == before


@pytest.mark.parametrize("deadline_s", [0.0, -1.0])
def test_expired_deadline_asks_no_holder(deadline_s: float) -> None:
    with page_server(PAGES) as (server, _), page_client() as client:
        job = load(loader(Holders(("a", server.port)), client), run_of(PAGES), deadline_s)
        assert job.reasons == [Reason.MISS] * 4
        assert server.stats.num_requests == 0
