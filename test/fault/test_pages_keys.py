"""Who may ask: keys of the role "peer", other people's keys, and none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from page_peers import PATIENT, Wanted, make_pages, page_client, page_server

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
