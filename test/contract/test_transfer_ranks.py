"""The handoff between instances of several ranks: tensor-parallel sizes that differ, latent KV with
ranks that send nothing, pipeline stages, and several instances of both roles at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transfer_pair import (
    SAME_HOST,
    TCP,
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

BASE = Shape(num_pages=16, num_heads=4, head_bytes=16)
SOURCE_PAGES, PAGES = [3, 9, 4], [12, 2, 7]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as open_ones:
        yield open_ones


def shape_of(tp_rank: int, tp_size: int, num_layers: int = 2, first_layer: int = 0) -> Shape:
    place = {"tp_rank": tp_rank, "tp_size": tp_size, "first_layer": first_layer}
    return replace(BASE, num_layers=num_layers, **place)


def prefill_of(
    stack: ExitStack, whole: Any, shape: Shape, settings: TransferConfig = TCP
) -> Prefill:
    one = stack.enter_context(prefill(shape, settings=settings))
    one.pool.kv[:] = share_of(whole, shape)
    return one


def serve(
    room: int, prefills: Sequence[Prefill], *, aux: Sequence[int | None] | None = None
) -> None:
    for index, sender in enumerate(prefills):
        sender.events.wait_for("ready", room)
        sender.send(room, SOURCE_PAGES, aux_row=1 if aux is None else aux[index])


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"),
    [(1, 2), (2, 1), (4, 2), (2, 4), (1, 4), (4, 1), (8, 1), (8, 2), (8, 4), (1, 8), (4, 8)],
)
@pytest.mark.parametrize("settings", [TCP, SAME_HOST], ids=["tcp", "same_host"])
def test_every_decode_rank_gets_its_heads(
    stack: ExitStack, prefill_tp: int, decode_tp: int, settings: TransferConfig
) -> None:
    """With 8 ranks and 4 heads, each head is on two of them. Parts of pages are never read out of
    prefill's memory, on the same machine either."""
    whole = whole_kv(BASE, 2)
    prefills = [
        prefill_of(stack, whole, shape_of(rank, prefill_tp), settings) for rank in range(prefill_tp)
    ]
    decodes = [
        stack.enter_context(decode(shape_of(rank, decode_tp), settings=settings))
        for rank in range(decode_tp)
    ]
    for sender in prefills:
        sender.endpoint.expect_room(1)
    for rank, receiver in enumerate(decodes):
        asked = [prefills[source] for source in sources_of(rank, prefill_tp, decode_tp)]
        receiver.open(1, asked, PAGES, num_receivers=max(1, decode_tp // prefill_tp))
    serve(1, prefills)
    for rank, receiver in enumerate(decodes):
        receiver.events.wait_for("done", 1)
        expected = share_of(whole, shape_of(rank, decode_tp))[:, SOURCE_PAGES]
        assert np.array_equal(receiver.pool.pages(PAGES), expected), rank
        others = [page for page in range(BASE.num_pages) if page not in PAGES]
        assert not receiver.pool.pages(others).any()
        receiver.endpoint.close_room(1)
    for sender in prefills:
        sender.events.wait_for("done", 1)
        eventually(lambda sender=sender: sender.endpoint.num_rooms == 0)


def test_latent_kv_is_sent_by_one_rank(stack: ExitStack) -> None:
    shape = Shape(latent=True, num_layers=3)
    prefills = [stack.enter_context(prefill(shape, seed=5)) for _ in range(4)]
    receiver = stack.enter_context(decode(shape))
    for sender in prefills:
        sender.endpoint.expect_room(1)
    receiver.open(1, prefills, PAGES, dummies=(1, 2, 3))
    serve(1, prefills)
    receiver.events.wait_for("done", 1)
    assert np.array_equal(receiver.pool.pages(PAGES), prefills[0].pool.pages(SOURCE_PAGES))
    for sender in prefills:
        sender.events.wait_for("done", 1)
    assert [sender.endpoint.stats.wire_bytes > 0 for sender in prefills] == [True] + [False] * 3


def test_pipeline_stages_send_layers_and_metadata(stack: ExitStack) -> None:
    whole = whole_kv(BASE, 4)
    stages = [prefill_of(stack, whole, shape_of(0, 1, 2, first)) for first in (0, 2)]
    stages[1].pool.aux[:, 1] = 42
    receiver = stack.enter_context(decode(shape_of(0, 1, 4)))
    for sender in stages:
        sender.endpoint.expect_room(1)
    receiver.open(1, stages, PAGES)
    serve(1, stages, aux=[None, 1])
    receiver.events.wait_for("done", 1)
    expected = share_of(whole, shape_of(0, 1, 4))[:, SOURCE_PAGES]
    assert np.array_equal(receiver.pool.pages(PAGES), expected)
    assert (receiver.pool.aux[:, 2] == 42).all()


def test_one_failing_rank_fails_the_room(stack: ExitStack) -> None:
    whole = whole_kv(BASE, 2)
    prefills = [prefill_of(stack, whole, shape_of(rank, 2)) for rank in range(2)]
    receiver = stack.enter_context(decode(shape_of(0, 1)))
    for sender in prefills:
        sender.endpoint.expect_room(1)
    receiver.open(1, prefills, PAGES)
    for sender in prefills:
        sender.events.wait_for("ready", 1)
    prefills[0].send(1, SOURCE_PAGES)
    prefills[1].endpoint.drop_room(1, "no memory on rank 1")
    assert receiver.events.wait_for("failed", 1)[2] == "PD peer failed: no memory on rank 1"
    eventually(lambda: not any(sender.endpoint.num_rooms for sender in prefills))
