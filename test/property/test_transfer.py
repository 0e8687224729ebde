"""What must hold for every layout, room and slab of a KV handoff, not only for those we thought of.

All ranks of a prefill and a decode instance are simulated with pools whose bytes name their model
position, so a head, layer or page in the wrong place shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_pair import Pool, Shape, indices, memory_of, share_of, sources_of, whole_kv
from transfer_strangers import introduced

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.layout import pair_buffers
from sglang_tiered.transfer.memory import Buffer, TokenSlice
from sglang_tiered.transfer.messages import MAGIC
from sglang_tiered.transfer.rooms import Progress
from sglang_tiered.transfer.same_host import Fence
from sglang_tiered.transfer.send_queue import cut_slabs
from sglang_tiered.wire import sockets

NUM_PAGES = 8


def hand_over(source: Pool, target: Pool, source_pages: Any, pages: Any) -> int:
    """Gather from one pool, scatter into the other. Returns how many bytes went over."""
    num_bytes = 0
    for sent, wanted in pair_buffers(source.layout, target.layout):
        data = np.empty(sent.page_bytes * len(pages), np.uint8)
        source.memories.kv.begin_gather([sent], source_pages, data)()
        target.memories.kv.scatter_slab([wanted], pages, data)
        num_bytes += data.nbytes
    return num_bytes


@st.composite
def deployments(draw: st.DrawFn) -> dict[str, int]:
    """Sizes SGLang can start: powers of two that divide each other, as its rank mapping needs."""
    powers = st.sampled_from([1, 2, 4, 8])
    pp = draw(st.sampled_from([1, 2]))
    return {
        "prefill_tp": draw(powers),
        "decode_tp": draw(powers),
        "num_heads": draw(powers),
        "num_layers": pp * draw(st.integers(1, 2)),
        "pp": pp,
        "page_size": draw(st.sampled_from([1, 2, 5])),
    }


@settings(max_examples=60, deadline=None)
@given(deployments(), st.permutations(range(NUM_PAGES)), st.permutations(range(NUM_PAGES)))
def test_every_decode_rank_gets_exactly_its_heads(
    sizes: dict[str, int], source_pages: list[int], pages: list[int]
) -> None:
    base = Shape(
        num_layers=sizes["num_layers"],
        page_size=sizes["page_size"],
        num_pages=NUM_PAGES,
        num_heads=sizes["num_heads"],
        head_bytes=2,
    )
    whole, per_stage = whole_kv(base, base.num_layers), base.num_layers // sizes["pp"]
    prefills: dict[tuple[int, int], Pool] = {}
    for stage in range(sizes["pp"]):
        part = replace(base, num_layers=per_stage, first_layer=stage * per_stage)
        for rank in range(sizes["prefill_tp"]):
            shape = replace(part, tp_rank=rank, tp_size=sizes["prefill_tp"])
            prefills[stage, rank] = pool = Pool(shape, 0)
            pool.kv[:] = share_of(whole, shape)
    used, asked = indices(pages[:5]), indices(source_pages[:5])
    for rank in range(sizes["decode_tp"]):
        shape = replace(base, tp_rank=rank, tp_size=sizes["decode_tp"])
        target = Pool(shape)
        num_bytes = sum(
            hand_over(prefills[stage, source], target, asked, used)
            for stage in range(sizes["pp"])
            for source in sources_of(rank, sizes["prefill_tp"], sizes["decode_tp"])
        )
        expected = share_of(whole, shape)
        assert np.array_equal(target.pages(pages[:5]), expected[:, source_pages[:5]])
        assert not target.pages(pages[5:]).any()
        assert num_bytes == expected[:, :5].nbytes, "a head was sent twice"


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
@given(
    tokens=st.integers(1, 6),
    low=st.integers(0, 7),
    length=st.integers(1, 8),
    pages=st.lists(st.integers(0, 9), min_size=1, unique=True),
)
def test_gathering_a_slice_touches_no_neighbour(
    tokens: int, low: int, length: int, pages: list[int]
) -> None:
    token_bytes = 15
    high = min(low + length, token_bytes)
    source = np.random.default_rng(3).integers(1, 256, (1, 10, tokens, token_bytes), np.uint8)
    target = np.zeros_like(source)
    part = TokenSlice(token_bytes, low, high)
    data = np.empty(len(pages) * tokens * part.num_bytes, np.uint8)
    memory_of(source).gather(0, indices(pages), part, data)
    memory_of(target).scatter(0, indices(pages), part, data)
    expected = np.zeros_like(source)
    expected[0, pages, :, low:high] = source[0, pages, :, low:high]
    assert np.array_equal(target, expected)


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
    progress.num_slabs = num_slabs
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
@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(frame: bytes) -> None:
    for decoder in (
        messages.control_from_decode,
        messages.control_from_prefill,
        messages.data_from_decode,
        messages.data_from_prefill,
    ):
        try:
            sockets.decode(frame, decoder)
        except TransferError as error:
            assert "not a message of this protocol" in str(error)


@settings(deadline=None)
@given(st.binary(max_size=20))
def test_only_the_version_frame_is_this_version(frame: bytes) -> None:
    for text in (frame, MAGIC + frame):
        if text != messages.VERSION_FRAME:
            with pytest.raises(TransferError):
                messages.check_version(text, "a peer")
