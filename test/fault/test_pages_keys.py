"""Who may ask: keys of the role "peer", other people's keys, and none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from page_peers import PATIENT, Wanted, make_pages, page_client, page_server

from kit.waiting import eventually
from sglang_tiered.sharing.pages.landing import Outcome
from sglang_tiered.wire.keys import PEER, load_keys, make_keys

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_tiered.wire.keys import Keys

pytestmark = pytest.mark.timeout(60)

PAGES = make_pages(1, [4096, 3 << 20])
HASTY = replace(PATIENT, connect_timeout_s=1.0, answer_timeout_s=1.0)


def peer_keys(directory: Path) -> Keys:
    make_keys(directory, [PEER])
    return load_keys(directory, PEER)


def test_servers_with_the_same_keys_share(tmp_path: Path) -> None:
    keys = peer_keys(tmp_path)
    with page_server(PAGES, keys=keys) as (server, _), page_client(keys=keys) as client:
        wanted = Wanted(client, server.port, PAGES)
        assert wanted.wait() == [Outcome.OK] * 2
        assert wanted.is_right


@pytest.mark.parametrize(
    ("asking", "serving"), [("theirs", "ours"), ("none", "ours"), ("ours", "none")]
)
def test_any_others_get_nothing(asking: str, serving: str, tmp_path: Path) -> None:
    known = {
        "ours": peer_keys(tmp_path / "ours"),
        "theirs": peer_keys(tmp_path / "theirs"),
        "none": None,
    }
    with (
        page_server(PAGES, keys=known[serving]) as (server, reader),
        page_client(HASTY, keys=known[asking]) as client,
    ):
        wanted = Wanted(client, server.port, PAGES)
        assert wanted.wait() == [Outcome.LOST] * 2
        assert wanted.is_untouched
        assert reader.num_reads == server.stats.num_requests == 0
        if known[serving] is not None:
            with page_client(keys=known[serving]) as friend:
                assert Wanted(friend, server.port, PAGES).wait() == [Outcome.OK] * 2


def test_the_public_key_alone_gets_nothing(tmp_path: Path) -> None:
    """It can encrypt to the server, and is not among those admitted."""
    ours, theirs = peer_keys(tmp_path / "ours"), peer_keys(tmp_path / "theirs")
    forged = replace(theirs, peer_public=ours.public)
    with (
        page_server(PAGES, keys=ours) as (server, reader),
        page_client(HASTY, keys=forged) as client,
    ):
        assert Wanted(client, server.port, PAGES).wait() == [Outcome.LOST] * 2
        assert reader.num_reads == 0


def test_nothing_readable_is_on_the_wire(tmp_path: Path) -> None:
    from socket import create_connection, create_server  # a relay of one connection
    from threading import Thread

    keys = peer_keys(tmp_path)
    page = b"a page that nobody on the way may read. " * 4000
    pages = {b"k" * 32: page}
    heard: list[bytes] = []
    with (
        page_server(pages, keys=keys) as (server, _),
        page_client(keys=keys) as client,
        create_server(("127.0.0.1", 0)) as relay,
    ):

        def pump(source: object, sink: object) -> None:
            try:
                while piece := source.recv(65536):  # type: ignore[attr-defined]
                    heard.append(piece)
                    sink.sendall(piece)  # type: ignore[attr-defined]
            except OSError:
                pass

        def serve() -> None:
            near, _ = relay.accept()
            with near, create_connection(("127.0.0.1", server.port)) as far:
                back = Thread(target=pump, args=(far, near), daemon=True)
                back.start()
                pump(near, far)

        thread = Thread(target=serve, daemon=True)
        thread.start()
        assert Wanted(client, relay.getsockname()[1], pages).wait() == [Outcome.OK]
        eventually(lambda: sum(map(len, heard)) > len(page))
        assert b"nobody on the way" not in b"".join(heard)
        assert b"k" * 32 not in b"".join(heard)
        client.close()
        thread.join(5.0)
