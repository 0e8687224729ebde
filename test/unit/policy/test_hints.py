"""Hints in their order, within their bound, until the end of their lives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy.hints import PIECE_TOKENS, Hint, HintQueue, piece_length

PAGE = 64


@pytest.mark.parametrize(
    ("num_held", "ends", "length"),
    [
        (0, None, 0),
        (PAGE, None, PAGE),
        (10 * PIECE_TOKENS, None, PIECE_TOKENS),
        (10 * PIECE_TOKENS, [], 0),
        (10 * PIECE_TOKENS, [PAGE, 2 * PAGE], 2 * PAGE),
        (10 * PIECE_TOKENS, [PAGE, PIECE_TOKENS + PAGE, 4 * PIECE_TOKENS], PIECE_TOKENS + PAGE),
    ],
)
def test_pieces_end_where_a_load_may(num_held: int, ends: list[int] | None, length: int) -> None:
    assert piece_length(num_held, page_tokens=PAGE, ends=ends) == length


@given(st.integers(0, 1 << 20), st.integers(1, 4096), st.integers(1, 4096))
def test_pieces_of_any_size_come_to_an_end(num_pages: int, page: int, piece: int) -> None:
    length = piece_length(num_pages * page, page_tokens=page, piece_tokens=piece)
    assert length % page == 0 and length <= max(page, piece)
    assert (length > 0) == (num_pages > 0)


def test_one_hint_never_takes_more_than_all_may() -> None:
    queue = HintQueue[Hint](1000, max_hints=2)
    assert queue.room_for(5000) == 1000
    queue.add(Hint("a"), 400, now=0.0)
    assert queue.room_for(600) == 600 and queue.room_for(601) == 0
    assert queue.room_for(5000) == 0, "it waits for the others, as it would take all"
    queue.add(Hint("b"), 1, now=0.0)
    assert queue.room_for(1) == 0, "there are too many"
