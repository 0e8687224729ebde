"""Loads over two holders: who is asked, who is asked next, and what is learnt of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from page_peers import (
    DEADLINE_S,
    HOST,
    NAMESPACE,
    StrangeServer,
    make_pages,
    page_client,
    page_server,
    strange_server,
)

from kit.waiting import eventually
from sglang_tiered.sharing.mirror import Peer
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.peer_loading import PeerLoader
from sglang_tiered.storage.base import Job, Reason, Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang_tiered.sharing.pages.client import PageClient

pytestmark = pytest.mark.timeout(60)

PAGES = make_pages(1, [4096, 5000, 100, 70_000])
KEYS = list(PAGES)


class Holders:
    """Who holds what, as ``Mirror`` tells it: the first that is neither avoided nor lacks
    the page."""

    def __init__(self, *peers: tuple[str, int]) -> None:
        self.peers = [Peer(name, f"tcp://{HOST}:{port}") for name, port in peers]
        self.lacking: set[tuple[str, bytes]] = set()
        self.avoided: list[tuple[str, float]] = []

    def find(self, keys: Sequence[bytes]) -> list[Peer | None]:
        return [self._find(key) for key in keys]

    def _find(self, key: bytes) -> Peer | None:
        away = {name for name, _ in self.avoided}
        for peer in self.peers:
            if peer.server not in away and (peer.server, key) not in self.lacking:
                return peer
        return None

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


def is_right(run: Run, *positions: int) -> bool:
    wanted = positions or range(run.num_pages)
    return all(bytes(run.pages[i][0]) == PAGES[run.keys[i]] for i in wanted)


@pytest.fixture
def liar() -> Iterator[StrangeServer]:
    with strange_server() as server:
        yield server


def test_each_page_comes_from_its_holder() -> None:
    left, right = dict(list(PAGES.items())[:2]), dict(list(PAGES.items())[2:])
    with page_server(left) as (a, _), page_server(right) as (b, _), page_client() as client:
        holders = Holders(("a", a.port), ("b", b.port))
        holders.lacking = {("a", key) for key in right}
        run = run_of(PAGES)
        job = load(loader(holders, client), run)
        assert job.reasons == [Reason.OK] * 4
        assert is_right(run)
        assert not holders.avoided


def test_second_holder_is_asked_for_missing_pages() -> None:
    with (
        page_server({KEYS[0]: PAGES[KEYS[0]]}) as (a, _),
        page_server(PAGES) as (b, _),
        page_client() as client,
    ):
        holders = Holders(("a", a.port), ("b", b.port))
        loads = loader(holders, client)
        run = run_of(PAGES)
        assert load(loads, run).reasons == [Reason.OK] * 4
        assert is_right(run)
        assert holders.lacking == {("a", key) for key in KEYS[1:]}
        assert loads.num_recovered == 3


def test_refusing_holder_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the mirror finds it again at once."""
    with page_server({}) as (server, _), page_client() as client:
        holders = Holders(("a", server.port))
        monkeypatch.setattr(holders, "lacks", lambda peer, keys: None)
        assert load(loader(holders, client), run_of(PAGES)).reasons == [Reason.MISS] * 4
        assert server.stats.num_requests == 1


def test_a_third_holder_is_not_asked() -> None:
    with (
        page_server({}) as (a, _),
        page_server({}) as (b, _),
        page_server(PAGES) as (c, _),
        page_client() as client,
    ):
        holders = Holders(("a", a.port), ("b", b.port), ("c", c.port))
        job = load(loader(holders, client), run_of(PAGES))
        assert job.reasons == [Reason.MISS] * 4
        assert c.stats.num_requests == 0


def test_damaged_page_is_fetched_from_another_holder(liar: StrangeServer) -> None:
    with page_server(PAGES) as (honest, _), page_client() as client:
        holders = Holders(("liar", liar.port), ("honest", honest.port))
        run = run_of(PAGES)
        job = loader(holders, client).submit(run, NAMESPACE, deadline_s=None)
        asked = liar.hear()
        liar.answer(messages.Fetch(asked.number, bytes(32), asked.keys, asked.lengths, 1), PAGES)
        assert job.wait(DEADLINE_S)
        assert job.reasons == [Reason.OK] * 4
        assert is_right(run)


def test_damaged_page_without_other_holder_is_corrupt(liar: StrangeServer) -> None:
    with page_client() as client:
        holders = Holders(("liar", liar.port))
        job = loader(holders, client).submit(run_of(PAGES), NAMESPACE, deadline_s=None)
        asked = liar.hear()
        liar.answer(messages.Fetch(asked.number, bytes(32), asked.keys, asked.lengths, 1), PAGES)
        assert job.wait(DEADLINE_S)
        assert job.reasons == [Reason.CORRUPT] * 4
        assert holders.lacking == {("liar", key) for key in KEYS}


def test_busy_holder_is_avoided_briefly(liar: StrangeServer) -> None:
    with page_server(PAGES) as (other, _), page_client() as client:
        holders = Holders(("busy", liar.port), ("other", other.port))
        job = loader(holders, client).submit(run_of(PAGES), NAMESPACE, deadline_s=None)
        liar.say(messages.Busy(liar.hear().number))
        assert job.wait(DEADLINE_S)
        assert job.reasons == [Reason.OK] * 4
        ((name, seconds),) = holders.avoided
        assert name == "busy"
        assert seconds < 1.0


def test_lost_holder_is_avoided_with_growing_pauses() -> None:
    with strange_server() as gone:
        port = gone.port
    with page_client() as client:
        holders = Holders(("gone", port))
        loads = loader(holders, client)
        times = []
        for _ in range(9):
            holders.avoided.clear()
            assert load(loads, run_of(PAGES)).reasons == [Reason.IO_ERROR] * 4
            times += [seconds for _, seconds in holders.avoided]
        assert times == sorted(times)
        assert times[0] < times[1] < times[2]
        assert times[-1] == 30.0


def test_silent_holder_is_avoided_without_second_try(
    liar: StrangeServer,
) -> None:
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
