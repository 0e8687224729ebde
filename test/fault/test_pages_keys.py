"""Who may ask: keys of the role "peer", other people's keys, and none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from socket import create_connection, create_server
from threading import Thread

import pytest
from page_peers import HOST, PATIENT, Wanted, make_pages, page_client, page_server

from kit.waiting import eventually
from sglang_tiered.sharing.pages.landing import PageOutcome
from sglang_tiered.wire.keys import PEER, Keys, load_keys, make_keys

pytestmark = pytest.mark.timeout(60)

PAGES = make_pages(1, [4096, 3 << 20])
HASTY = replace(PATIENT, connect_timeout_s=1.0, answer_timeout_s=1.0)


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Keys | None]:
    """``forged`` can encrypt to a server of ``ours``, and is not among those admitted."""
    for name in ("ours", "theirs"):
        make_keys(tmp_path / name, [PEER])
    ours, theirs = (load_keys(tmp_path / name, PEER) for name in ("ours", "theirs"))
    forged = replace(theirs, peer_public=ours.public)
    return {"ours": ours, "theirs": theirs, "forged": forged, "none": None}


@pytest.mark.parametrize(
    ("asking", "serving"),
    [("theirs", "ours"), ("none", "ours"), ("forged", "ours"), ("ours", "none")],
)
def test_only_who_has_the_same_keys_gets_pages(
    known: dict[str, Keys | None], asking: str, serving: str
) -> None:
    with page_server(PAGES, keys=known[serving]) as (server, reader):
        with page_client(HASTY, keys=known[asking]) as stranger:
            wanted = Wanted(stranger, server.port, PAGES)
            assert wanted.wait() == [PageOutcome.LOST] * 2
            assert wanted.is_untouched
            assert reader.num_reads == server.stats.num_requests == 0
        with page_client(keys=known[serving]) as friend:
            wanted = Wanted(friend, server.port, PAGES)
            assert wanted.wait() == [PageOutcome.OK] * 2
            assert wanted.is_right


def test_nothing_readable_is_on_the_wire(known: dict[str, Keys | None]) -> None:
    page = b"a page that nobody on the way may read. " * 4000
    pages = {b"k" * 32: page}
    heard: list[bytes] = []
    with (
        page_server(pages, keys=known["ours"]) as (server, _),
        page_client(keys=known["ours"]) as client,
        create_server((HOST, 0)) as relay,
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
            with near, create_connection((HOST, server.port)) as far:
                back = Thread(target=pump, args=(far, near), daemon=True)
                back.start()
                pump(near, far)

        thread = Thread(target=serve, daemon=True)
        thread.start()
        assert Wanted(client, relay.getsockname()[1], pages).wait() == [PageOutcome.OK]
        eventually(lambda: sum(map(len, heard)) > len(page))
        assert b"nobody on the way" not in b"".join(heard)
        assert b"k" * 32 not in b"".join(heard)
        client.close()
        thread.join(5.0)
