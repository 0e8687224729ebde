"""What the transfer benchmark's plain sides do to the bytes they carry."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
import zmq

from transfer_bench.pools import Pool, Shape, prompt_pages
from transfer_bench.raw_sockets import (
    receive_frames,
    receive_pages,
    receive_prompt,
    send_frames,
    send_pages,
    send_prompt,
)


def socket_pair(*, is_zeromq: bool) -> tuple[Any, Any]:
    if not is_zeromq:
        return socket.socketpair()
    one, other = (zmq.Context.instance().socket(zmq.PAIR) for _ in range(2))
    other.connect(f"tcp://127.0.0.1:{one.bind_to_random_port('tcp://127.0.0.1')}")
    return one, other


@pytest.mark.parametrize("page_size", [1, 64])
def test_pages_and_slabs_carry_the_same_bytes(page_size: int) -> None:
    shape = Shape(2, 32, page_size)
    source = Pool(shape, filled=True)
    pages, places = prompt_pages(shape, 1), prompt_pages(shape, 2)
    for send, receive in (
        (send_prompt, receive_prompt),
        (send_pages, receive_pages),
        (send_frames, receive_frames),
    ):
        target = Pool(shape, filled=False)
        one, other = socket_pair(is_zeromq=send is send_frames)
        with one, other:
            thread = threading.Thread(target=send, args=(one, source, pages))
            thread.start()
            receive(other, target, places)
            thread.join(60)
        assert target.digest(places) == source.digest(pages)
        untouched = np.setdiff1d(np.arange(shape.num_pages), places)
        assert not target.array[:, untouched].any()
