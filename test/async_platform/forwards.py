"""Forwards that a device would still be at when their launch returns.

Here a forward has run within its launch. What comes behind it, the fence of a copy or the event of
its results, must not be done before the delay of the forward is over. Where it overlaps, its rows
get their old bytes back until a thread waits for it, or the next forward begins: a copy
without a fence, or another thread or process that sends, reads what it would read on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import device as streams
import numpy as np

if TYPE_CHECKING:
    import torch
    from books import DeviceSlots
    from seams import Bed

    Written = list[tuple[DeviceSlots, torch.Tensor]]


def late(bed: Bed, slots_of: Callable[[Any], DeviceSlots | None]) -> Callable[[Any], Any]:
    def around(original: Any) -> Any:
        def forward(self: Any, forward_batch: Any, *arguments: Any, **named: Any) -> Any:
            bed.report.ran("forward")
            stream = streams.current_stream()
            bed.device.demand(stream, stream.end)  # the forward before
            overlaps = stream is self.forward_stream
            if overlaps:
                stream.called("forward", lazy=False)
            written = _written(self, forward_batch, slots_of)
            with bed.device.lock:
                for book, rows in written:
                    book.begin_forward(rows.numpy(), stream)
            old = _rows(written) if overlaps else []
            result = original(self, forward_batch, *arguments, **named)
            reads = _read(self, forward_batch) if written else np.zeros(0, np.int64)
            with bed.device.lock:
                if overlaps:
                    new = functools.partial(_set_rows, written, _rows(written))
                    _set_rows(written, old)
                    index = stream.busy(new, "forward")
                else:  # the host takes its result at once
                    stream.record_event()
                    index = stream.end
                for book, rows in written:
                    book.end_forward(reads, rows.numpy(), stream, index)
                    reads = reads[:0]  # of the first pool, which is that of all layers
            return result

        return forward

    return around


def _written(runner: Any, batch: Any, slots_of: Callable[[Any], DeviceSlots | None]) -> Written:
    """The books of the pools that a forward writes, with the slots; those of all layers first."""
    rows, pool = batch.out_cache_loc, runner.token_to_kv_pool
    if rows is None:
        return []
    rows = rows.to(dtype=rows.dtype, copy=True)
    book, of_windows = slots_of(pool), slots_of(getattr(pool, "swa_kv_pool", None))
    found: Written = [] if book is None else [(book, rows)]
    if of_windows is not None:
        found.append((of_windows, pool.translate_loc_from_full_to_swa(rows)))
    return found


def _read(runner: Any, batch: Any) -> Any:
    table = runner.req_to_token_pool.req_to_token
    requests = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=False)
    slots = [table[request, :length].numpy() for request, length in requests]
    return np.concatenate(slots).astype(np.int64) if slots else np.zeros(0, np.int64)


def _rows(written: Written) -> list[list[torch.Tensor]]:
    return [[buffer[rows] for buffer in book.buffers] for book, rows in written]


def _set_rows(written: Written, values: list[list[torch.Tensor]]) -> None:
    import torch

    with torch.inference_mode():
        for (book, rows), of_book in zip(written, values, strict=True):
            for buffer, value in zip(book.buffers, of_book, strict=True):
                buffer[rows] = value
