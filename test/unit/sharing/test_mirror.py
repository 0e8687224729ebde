"""What is found at other servers while the weights here change."""

from __future__ import annotations

import numpy as np

from sglang_tiered.sharing.mirror import Mirror, Peer


def test_nothing_is_found_while_the_namespace_changes() -> None:
    mirror = Mirror(1000, 4, salt=7, digest=bytes, clock=lambda: 0.0)
    page = (10).to_bytes(8, "little") + bytes(24)

    def see() -> None:
        peer = Peer("1", "tcp://192.0.2.1:7000")
        known = mirror.join(peer) or mirror._peers[peer.server]
        known.is_live = True
        mirror.choose()

    def is_found_anew() -> bool:
        see()
        assert mirror.add_pages(mirror._peers["1"], np.array([10], np.uint64))
        mirror.loaded(mirror._peers["1"])
        return mirror.find([page]) != [None]

    assert is_found_anew()
    mirror.hide()
    see()  # by a follower that has not noticed
    assert mirror.find([page]) == [None]
    mirror.hide()
    for is_last in (False, True):
        mirror.begin_namespace()
        assert not mirror._peers
        assert is_found_anew() == is_last
