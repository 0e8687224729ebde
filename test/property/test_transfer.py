"""What must hold for every slab and message of a KV handoff, not only for those we thought of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_pair import indices
from transfer_strangers import introduced

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.memory import Buffer
from sglang_tiered.transfer.messages import MAGIC
from sglang_tiered.transfer.rooms import Progress
from sglang_tiered.transfer.same_host import Fence
from sglang_tiered.transfer.send_queue import cut_slabs


@settings(deadline=None)
@given(
    num_pages=st.integers(0, 40),
    page_bytes=st.lists(st.integers(1, 3000), max_size=12),
    page_size=st.sampled_from([1, 4, 16, 64, 200]),
    target_bytes=st.integers(1, 20000),
)
def test_slabs_are_small_and_cover_pages_once(
    num_pages: int, page_bytes: list[int], page_size: int, target_bytes: int
) -> None:
    covered = np.zeros((num_pages, len(page_bytes)), int)
    for slab in cut_slabs(num_pages, page_bytes, page_size, target_bytes):
        pages = slice(slab.start, slab.start + slab.num_pages)
        pairs = slice(slab.first_pair, slab.first_pair + slab.num_pairs)
        assert 0 < slab.num_pages <= num_pages - slab.start
        assert 0 < slab.num_pairs <= len(page_bytes) - slab.first_pair
        covered[pages, pairs] += 1
        assert slab.num_bytes == slab.num_pages * sum(page_bytes[pairs])
        # Larger than asked for only where one page of one pair is.
        assert slab.num_bytes <= target_bytes or slab.num_pages == slab.num_pairs == 1
    assert (covered == 1).all()


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), max_size=60), st.integers(0, 40))
def test_progress_is_a_set_of_numbers(seqs: list[int], num_slabs: int) -> None:
    progress, seen = Progress(), set[int]()
    for seq in seqs:
        progress.mark(seq, 1.0)
        seen.add(seq)
    assert progress.seen == seen
    assert not progress.is_complete
    assert progress.has_gap == (seen != set(range(len(seen))))
    progress.last = messages.Last(1, 1, num_slabs, [])
    assert progress.is_complete == (len(seen) >= num_slabs)


@settings(deadline=None)
@given(
    st.permutations(range(12)).map(lambda order: order[:7]),
    st.permutations(range(12)).map(lambda order: order[:7]),
)
def test_pages_read_from_a_process_land_right(source_pages: list[int], pages: list[int]) -> None:
    """Runs that are consecutive on both sides are read in one go; the bytes must not show it."""
    source = np.random.default_rng(5).integers(1, 256, (2, 12, 8), np.uint8)
    target = np.zeros_like(source)
    fence = Fence()
    buffers = [
        (index, Buffer(part.ctypes.data, part.nbytes, 8)) for index, part in enumerate(target)
    ]
    word = fence.address, fence.value
    offered = [Buffer(part.ctypes.data, part.nbytes, 8) for part in source]
    with introduced(offered) as (peer, tagger):
        assert peer.is_right(tagger.tag(b""), b"")
        assert peer.pull(buffers, indices(source_pages), indices(pages), word) is None
    expected = np.zeros_like(source)
    expected[:, pages] = source[:, source_pages]
    assert np.array_equal(target, expected)


@settings(deadline=None)
@given(st.binary(max_size=20))
def test_only_the_version_frame_is_this_version(frame: bytes) -> None:
    for text in (frame, MAGIC + frame):
        if text != messages.VERSION_FRAME:
            with pytest.raises(TransferError):
                messages.check_version(text, "a peer")
