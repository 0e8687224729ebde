"""The handoff between instances of several ranks: tensor-parallel sizes that differ, latent KV with
ranks that send nothing, pipeline stages, and several instances of both roles at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from transfer_pair import (
    SAME_HOST,
    TCP,
    Decode,
    Prefill,
    Shape,
    decode,
    prefill,
    share_of,
    sources_of,
    whole_kv,
)

from kit.waiting import eventually
from sglang_tiered.config import TransferConfig

pytestmark = pytest.mark.timeout(60)

SIZES = (1, 2, 4, 8)
SOURCE_PAGES, PAGES = [3, 9, 4], [12, 2, 7]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as open_ones:
        yield open_ones


def shape_of(rank: int = 0, tp: int = 1, num_heads: int = 4, layers: range = range(2)) -> Shape:
    place: dict[str, Any] = {"tp_rank": rank, "tp_size": tp, "first_layer": layers.start}
    return Shape(len(layers), num_pages=16, num_heads=num_heads, head_bytes=16, **place)


def prefill_of(
    stack: ExitStack, whole: Any, shape: Shape, settings: TransferConfig = TCP
) -> Prefill:
    one = stack.enter_context(prefill(shape, settings=settings))
    one.pool.kv[:] = share_of(whole, shape)
    return one


def begin(prefills: Sequence[Prefill], receiver: Decode, **more: Any) -> None:
    """Room 1, of one decode rank."""
    for sender in prefills:
        sender.endpoint.expect_room(1)
    receiver.open(1, prefills, PAGES, **more)


def serve(prefills: Sequence[Prefill], aux_rows: Sequence[int | None] = ()) -> None:
    for sender, row in zip(prefills, aux_rows or [1] * len(prefills), strict=True):
        sender.events.wait_for("ready", 1)
        sender.send(1, SOURCE_PAGES, aux_row=row)


def landed(receiver: Decode, whole: Any) -> None:
    """All of a decode rank's share of the pages, and nothing else."""
    receiver.events.wait_for("done", 1)
    shape = receiver.pool.shape
    expected = share_of(whole, shape)[:, SOURCE_PAGES]
    assert np.array_equal(receiver.pool.pages(PAGES), expected), shape
    assert not receiver.pool.pages([page for page in range(16) if page not in PAGES]).any()


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(one, two) for one in SIZES for two in SIZES if one != two]
)
@pytest.mark.parametrize(
    ("num_heads", "settings"), [*((size, TCP) for size in SIZES), (4, SAME_HOST)]
)
def test_every_decode_rank_gets_its_heads(
    stack: ExitStack, prefill_tp: int, decode_tp: int, num_heads: int, settings: TransferConfig
) -> None:
    """With more ranks than heads, each head is on several. Parts of pages are never read out of
    prefill's memory, on the same machine either."""
    whole = whole_kv(shape_of(num_heads=num_heads), 2)
    prefills = [
        prefill_of(stack, whole, shape_of(rank, prefill_tp, num_heads), settings)
        for rank in range(prefill_tp)
    ]
    decodes = [
        stack.enter_context(decode(shape_of(rank, decode_tp, num_heads), settings=settings))
        for rank in range(decode_tp)
    ]
    for rank, receiver in enumerate(decodes):
        asked = [prefills[source] for source in sources_of(rank, prefill_tp, decode_tp)]
        begin(asked, receiver, num_receivers=max(1, decode_tp // prefill_tp))
    serve(prefills)
    for receiver in decodes:
        landed(receiver, whole)
        receiver.endpoint.close_room(1)
    for sender in prefills:
        sender.events.wait_for("done", 1)
        eventually(lambda sender=sender: sender.endpoint.num_rooms == 0)


def test_latent_kv_is_sent_by_one_rank(stack: ExitStack) -> None:
    shape = Shape(latent=True, num_layers=3)
    prefills = [stack.enter_context(prefill(shape, seed=5)) for _ in range(4)]
    receiver = stack.enter_context(decode(shape))
    begin(prefills, receiver, dummies=(1, 2, 3))
    serve(prefills)
    receiver.events.wait_for("done", 1)
    assert np.array_equal(receiver.pool.pages(PAGES), prefills[0].pool.pages(SOURCE_PAGES))
    for sender in prefills:
        sender.events.wait_for("done", 1)
    assert [sender.endpoint.stats.wire_bytes > 0 for sender in prefills] == [True] + [False] * 3


@pytest.mark.parametrize("decode_tp", [1, 2])
def test_pipeline_stages_send_layers_and_metadata(stack: ExitStack, decode_tp: int) -> None:
    whole = whole_kv(shape_of(), 4)
    stages = [
        prefill_of(stack, whole, shape_of(layers=range(first, first + 2))) for first in (0, 2)
    ]
    stages[1].pool.aux[:, 1] = 42
    decodes = [
        stack.enter_context(decode(shape_of(rank, decode_tp, layers=range(4))))
        for rank in range(decode_tp)
    ]
    for receiver in decodes:
        begin(stages, receiver, num_receivers=decode_tp)
    serve(stages, [None, 1])
    for receiver in decodes:
        landed(receiver, whole)
        assert (receiver.pool.aux[:, 2] == 42).all()


def test_one_failing_rank_fails_the_room(stack: ExitStack) -> None:
    whole = whole_kv(shape_of(), 2)
    prefills = [prefill_of(stack, whole, shape_of(rank, 2)) for rank in range(2)]
    receiver = stack.enter_context(decode(shape_of()))
    begin(prefills, receiver)
    for sender in prefills:
        sender.events.wait_for("ready", 1)
    prefills[0].send(1, SOURCE_PAGES)
    prefills[1].endpoint.drop_room(1, "no memory on rank 1")
    assert receiver.events.wait_for("failed", 1)[2] == "PD peer failed: no memory on rank 1"
    eventually(lambda: not any(sender.endpoint.num_rooms for sender in prefills))
