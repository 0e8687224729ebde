"""A page server and a client over real sockets: what is asked for comes, whole and verified."""

from __future__ import annotations

import pytest
from page_peers import NAMESPACE, Wanted, make_pages, page_client, page_server

from kit.waiting import eventually
from sglang_tiered.sharing.pages.link import PageOutcome
from sglang_tiered.sharing.settings import PageSettings
from sglang_tiered.storage.base import JobKind, Run

pytestmark = pytest.mark.timeout(60)

MiB = 1 << 20
ODD_SIZES = [1, 4095, 4096, 4097, 65_536, 100_000, 3 * MiB + 5, 7, MiB]
SMALL = PageSettings(request_bytes=64 << 10, window_bytes=256 << 10, max_requests=2)


@pytest.mark.parametrize("settings", [PageSettings(), SMALL], ids=["default", "small"])
@pytest.mark.parametrize("cuts", [1, 2, 5])
def test_pages_of_any_length_arrive_whatever_their_segments(
    settings: PageSettings, cuts: int
) -> None:
    """And what is held under no such key, or another length, is a miss that writes nothing."""
    held = make_pages(1, ODD_SIZES)
    gone = make_pages(2, [5000] * 4)
    first, second, *more = held
    wants = {**gone, **held, first: bytes(2), second: bytes(4096)}
    order = sorted(wants)  # of hashes, so they are mixed
    with page_server(held) as (server, tier), page_client(settings) as client:
        wanted = Wanted(client, server.port, {key: wants[key] for key in order}, cuts=cuts)
        assert wanted.wait() == [
            PageOutcome.OK if key in more else PageOutcome.MISS for key in order
        ]
        for key, buffer in wanted.buffers.items():
            assert bytes(buffer) == (held[key] if key in more else b"\xa5" * len(wants[key]))
        eventually(lambda: server.held_bytes == 0)
        assert client.num_bytes == server.bytes_served == sum(ODD_SIZES[2:])


def test_another_namespace_is_a_miss() -> None:
    """Of the server, or from the moment on when it has another one."""
    pages, other = make_pages(4, [4096] * 3), b"\x23" * 32
    with page_server(pages) as (server, tier), page_client() as client:
        wanted = Wanted(client, server.port, pages, namespace=other)
        assert wanted.wait() == [PageOutcome.MISS] * 3 and wanted.is_untouched
        assert tier.deadlines == [], "it was read"
        tier.holding = {JobKind.LOAD}
        wanted = Wanted(client, server.port, pages)
        eventually(lambda: tier.num_held == 1)
        server.set_namespace(other)
        tier.release()
        assert wanted.wait() == [PageOutcome.MISS] * 3 and wanted.is_untouched
        eventually(lambda: server.held_bytes == 0)
        assert Wanted(client, server.port, pages).wait() == [PageOutcome.MISS] * 3
        assert len(tier.deadlines) == 1


def test_requests_stay_within_the_window() -> None:
    pages = make_pages(7, [50_000] * 40)
    settings = PageSettings(request_bytes=50_000, window_bytes=400_000, max_requests=64)
    with page_server(pages) as (server, tier), page_client(settings) as client:
        tier.holding = {JobKind.LOAD}
        wanted = Wanted(client, server.port, pages)
        eventually(lambda: server.num_requests == 4)
        assert client.num_requests == 4, "half of the window at one server"
        tier.release()
        assert wanted.wait() == [PageOutcome.OK] * 40


def test_one_request_goes_out_however_large_it_is() -> None:
    pages = make_pages(8, [300_000])
    settings = PageSettings(request_bytes=1000, window_bytes=1000, max_serving_bytes=1000)
    with page_server(pages, settings=settings) as (server, _), page_client(settings) as client:
        assert Wanted(client, server.port, pages).wait() == [PageOutcome.OK]


def test_closed_client_cancels_open_and_later_fetches() -> None:
    pages = make_pages(11, [4096] * 4)
    with page_server(pages) as (server, tier), page_client() as client:
        tier.holding = {JobKind.LOAD}
        wanted = Wanted(client, server.port, pages)
        eventually(lambda: tier.num_held == 1)
        client.close()
        assert wanted.wait() == [PageOutcome.CANCELLED] * 4
        assert Wanted(client, server.port, pages).wait() == [PageOutcome.CANCELLED] * 4
        client.close()


def test_idle_connections_are_closed_and_made_again() -> None:
    pages = make_pages(13, [10])
    settings = PageSettings(idle_s=0.2)
    with page_server(pages) as (server, _), page_client(settings) as client:
        for _ in range(2):
            assert Wanted(client, server.port, pages).wait() == [PageOutcome.OK]
            eventually(lambda: client.num_links == 0)
        assert client.num_links_lost == 0


def test_the_number_of_connections_is_bounded() -> None:
    pages = make_pages(14, [10])
    settings = PageSettings(max_links=1)
    with (
        page_server(pages) as (first, tier),
        page_server(pages) as (second, _),
        page_client(settings) as client,
    ):
        tier.holding = {JobKind.LOAD}
        slow = Wanted(client, first.port, pages)
        eventually(lambda: tier.num_held == 1)
        assert Wanted(client, second.port, pages).wait() == [PageOutcome.BUSY]
        tier.release()
        assert slow.wait() == [PageOutcome.OK]
        assert Wanted(client, second.port, pages).wait() == [PageOutcome.OK]
        assert client.num_links == 1


def test_invalid_address_is_not_connected() -> None:
    ended: list[PageOutcome] = []
    with page_client() as client:
        run = Run((bytes(32),), ((memoryview(bytearray(10)),),))
        client.fetch("ipc:///tmp/x", NAMESPACE, run, None, lambda each: ended.extend(each.outcomes))
        eventually(lambda: ended == [PageOutcome.LOST])
        assert client.num_links == 0
