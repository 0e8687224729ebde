"""Whose processor time it was, and when a turn counts as stored."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from serving_bench.stored_soon import Turn, Watch


def test_a_turn_never_seen_stored_ages_on() -> None:
    stored = {100: 0, 200: 128}

    def num_stored(tokens: Sequence[int]) -> int:
        return stored[len(tokens)]

    now = SimpleNamespace(s=10.0)
    watch = Watch(num_stored, clock=lambda: now.s)
    # Of 200 tokens three pages are whole; the last token of an answer was never computed.
    watch.add([Turn("a", (1,) * 100, 8.0), Turn("b", (1,) * 200, 9.0)])
    watch.poll()
    assert watch.all_ages_s(12.0) == [4.0, 3.0]
    now.s, stored[200] = 11.5, 192
    watch.poll()
    assert watch.all_ages_s(41.0) == [2.5, 33.0]
    assert Turn("c", (1,) * 193, 0.0).num_kept == 192
    assert Turn("d", (1,) * 192, 0.0).num_kept == 128
