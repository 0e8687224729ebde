"""One batch as tables of tiles, made on the host once per forward and shared by its layers.

A *unit* is a tile without its head: prefill units are (row, block of queries) and run once per
query head; decode units are (row, split of its keys) and run once per KV head. Fields of a prefill
unit: row, first query, queries, position of the first; of a decode unit: row, query, first key, end
of keys, place in the workspace or -1; of a merge: query, first place, places. The tables travel as
one int32 tensor in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_tiered_kernels.pod_attention import heuristics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from sglang_tiered_kernels.pod_attention.heuristics import PodConfig
    from sglang_tiered_kernels.pod_attention.shape import PodShape, Schedule


# int32 fields of a record, in order; the kernel reads them by position.
PREFILL_FIELDS = ("row", "first_query", "num_queries", "first_position")
DECODE_FIELDS = ("row", "query", "kv_begin", "kv_end", "partial")
MERGE_FIELDS = ("query", "first_partial", "num_partials")

# SM numbers are taken modulo this: %smid is below it on every device so far, and a clash would only
# share a ticket counter. %nsmid is not trusted, since it was never checked under partitioning.
NUM_SM_SLOTS = 256
# Tickets begin a cache line (32 int32) after the tiles' counters, which every thread block asks.
# A launch's counters are whole lines, so that all begin equally aligned: the compiler specialises
# on a pointer's alignment.
FIRST_TICKET = 32
_COUNTERS_PER_LAUNCH = FIRST_TICKET + NUM_SM_SLOTS
# Launches that one clearing of the counters serves: a forward's layers, mostly.
_LAUNCHES_PER_CLEARING = 64


def is_decode_row(extend_len: int, prefix_len: int) -> bool:
    """Whether a row is run as decode: one new token that attends to tokens before it.

    SGLang hides from a backend which rows of a mixed batch are decoding. One-token tails of a
    chunked prefill look the same and gain as much, as do prompts found in the radix cache up to one
    token. So the shape alone decides, here and nowhere else.
    """
    return extend_len == 1 and prefix_len > 0


@dataclass(eq=False)
class PodPlan:
    """How to attend for one batch; from ``make_plan``. For one forward on one stream.

    extend_lens, prefix_lens: [rows] int64 on the host. prefill_units: [n, 4], decode_units: [n, 5],
    merges: [n, 3], int32 on the host, fields as in ``PREFILL_FIELDS`` and so on. table: the three
    end to end on the device. A decode unit's ``partial`` is its place in the workspace, or -1 where
    its row has a single unit, which writes to the output itself.

    split_len: the tokens of the longest decode unit allowed. tickets: of a period, for prefill and
    decode. prefill_estimate_s, decode_estimate_s: what each role would take alone, per layer, by
    the rates of ``heuristics``. fuse: the gate's verdict. schedule: of a fused launch.

    The plan owns the workspace and the counters of its launches, made at the first launch that
    needs them, so two streams must not share a plan; but one may run its prefill role and another
    its decode role. Make a plan before capturing a CUDA graph, not within.
    """

    shape: PodShape
    config: PodConfig
    window: int
    num_sms: int
    device: torch.device
    extend_lens: NDArray[np.int64]
    prefix_lens: NDArray[np.int64]
    prefill_units: NDArray[np.int32]
    decode_units: NDArray[np.int32]
    merges: NDArray[np.int32]
    table: torch.Tensor
    split_len: int
    tickets: tuple[int, int]
    prefill_estimate_s: float
    decode_estimate_s: float
    fuse: bool
    schedule: Schedule
    # What the path that serves the plan keeps between layers; its own business.
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        return len(self.extend_lens)

    @cached_property
    def num_tokens(self) -> int:
        """Queries of the batch."""
        return int(self.extend_lens.sum())

    @cached_property
    def num_kv_tokens(self) -> int:
        """Entries of ``kv_indices`` that the rows use together."""
        return self.num_tokens + int(self.prefix_lens.sum())

    @property
    def num_prefill_tiles(self) -> int:
        return len(self.prefill_units) * self.shape.num_q_heads

    @property
    def num_decode_tiles(self) -> int:
        return len(self.decode_units) * self.shape.num_kv_heads

    @cached_property
    def num_partials(self) -> int:
        """Decode units whose results are merged afterwards."""
        return int(self.merges[:, 2].sum())

    @property
    def decode_table_offset(self) -> int:
        """Elements of ``table`` before the decode records."""
        return self.prefill_units.size

    @property
    def merge_table_offset(self) -> int:
        return self.prefill_units.size + self.decode_units.size

    def workspace(self) -> torch.Tensor:
        """[num_partials * q_heads * (dim + 1)] float32: the partial outputs, then their
        logarithms of the softmax's denominator. Reused by every launch."""
        if "workspace" not in self.kept:
            size = self.num_partials * self.shape.num_q_heads * (self.shape.head_dim + 1)
            self.kept["workspace"] = torch.empty(
                max(1, size), dtype=torch.float32, device=self.device
            )
        kept: torch.Tensor = self.kept["workspace"]
        return kept

    def counters(self) -> torch.Tensor:
        """int32 zeros for one launch: the next prefill tile, the next decode tile and, from
        ``FIRST_TICKET`` on, the next ticket of each SM.

        Each launch gets counters of its own out of a block that is cleared once per
        ``_LAUNCHES_PER_CLEARING`` launches, so a forward pays one memset and not one per layer. A
        launch captured into a CUDA graph clears its own, since replays come back to the same ones.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(_COUNTERS_PER_LAUNCH, dtype=torch.int32, device=self.device)
        used = self.kept.get("launches", 0) % _LAUNCHES_PER_CLEARING
        if "counters" not in self.kept:
            self.kept["counters"] = torch.zeros(
                _LAUNCHES_PER_CLEARING, _COUNTERS_PER_LAUNCH, dtype=torch.int32, device=self.device
            )
        elif used == 0:
            self.kept["counters"].zero_()
        self.kept["launches"] = used + 1
        counters: torch.Tensor = self.kept["counters"][used]
        return counters


def make_plan(
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    shape: PodShape,
    *,
    num_sms: int,
    window: int = -1,
    config: PodConfig | None = None,
    device: torch.device | str = "cpu",
) -> PodPlan:
    """Cut a batch into tiles.

    extend_lens, prefix_lens: per row in batch order, the new tokens (the queries) and the tokens
    before them, whose keys are in the pool already. A row without new tokens has no tiles.
    num_sms: multiprocessors of the device. window: a query at position ``p`` sees the keys from
    ``p - window`` on (SGLang's inclusive meaning); -1 for all. Layers that differ in window need a
    plan each. config: tile sizes; by default ``heuristics.choose_config`` picks.

    No synchronisation: on a CUDA device the tables are copied from pinned memory in stream order.
    """
    extend = np.asarray(extend_lens, dtype=np.int64).reshape(-1)
    prefix = np.asarray(prefix_lens, dtype=np.int64).reshape(-1)
    if config is None:
        config = heuristics.choose_config(int(extend.max(initial=0)))
    # The array form of ``is_decode_row``; a test holds the two together.
    decoding = (extend == 1) & (prefix > 0)
    first_query = np.cumsum(extend) - extend

    prefill = _prefill_units(extend, prefix, first_query, ~decoding, window, config)
    prefill_s = heuristics.prefill_tile_s(_prefill_steps(prefill, window, config), shape, config)

    kv_end = prefix[decoding] + 1
    kv_begin = np.maximum(0, kv_end - 1 - window) if window >= 0 else np.zeros_like(kv_end)
    split_len = config.split_len or heuristics.choose_split_len(
        int((kv_end - kv_begin).sum()), shape, num_sms, config.block_n_decode
    )
    decode, merges = _decode_units(
        np.flatnonzero(decoding),
        first_query[decoding],
        kv_begin,
        kv_end,
        split_len,
        config.block_n_decode,
    )
    decode_s = heuristics.decode_tile_s((decode[:, 3] - decode[:, 2]).astype(np.int64), shape)

    target = torch.device(device)
    prefill_estimate_s = heuristics.role_s(prefill_s, shape.num_q_heads, num_sms)
    decode_estimate_s = heuristics.role_s(decode_s, shape.num_kv_heads, num_sms)
    return PodPlan(
        shape=shape,
        config=config,
        window=window,
        num_sms=num_sms,
        device=target,
        extend_lens=extend,
        prefix_lens=prefix,
        prefill_units=prefill,
        decode_units=decode,
        merges=merges,
        table=_upload((prefill, decode, merges), target),
        split_len=split_len,
        tickets=heuristics.ticket_ratio(
            len(prefill) * shape.num_q_heads, len(decode) * shape.num_kv_heads
        ),
        prefill_estimate_s=prefill_estimate_s,
        decode_estimate_s=decode_estimate_s,
        fuse=heuristics.worth_fusing(prefill_estimate_s, decode_estimate_s),
        schedule=heuristics.choose_schedule(prefill_estimate_s, decode_estimate_s),
    )


def _prefill_units(
    extend: NDArray[np.int64],
    prefix: NDArray[np.int64],
    first_query: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    window: int,
    config: PodConfig,
) -> NDArray[np.int32]:
    """[n, 4] records of the blocks of queries of the ``chosen`` rows, costliest first."""
    blocks = np.where(chosen, _ceil_div(extend, config.block_m), 0)
    row = np.repeat(np.arange(len(extend)), blocks)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * config.block_m
    units = np.stack(
        (
            row,
            first_query[row] + offset,
            np.minimum(config.block_m, extend[row] - offset),
            prefix[row] + offset,
        ),
        axis=1,
    ).astype(np.int32)
    # Longest first, so that the last blocks to start are short ones.
    order = np.argsort(-_prefill_steps(units, window, config), kind="stable")
    return units[order]


def _prefill_steps(units: NDArray[np.int32], window: int, config: PodConfig) -> NDArray[np.int64]:
    """[n] steps of ``block_n`` keys that a tile of each unit takes, as the kernel counts them."""
    first = units[:, 3].astype(np.int64)
    begin = np.maximum(0, first - window) if window >= 0 else np.zeros_like(first)
    return _ceil_div(first + units[:, 2], config.block_n) - begin // config.block_n


def _decode_units(
    row: NDArray[np.int64],
    query: NDArray[np.int64],
    kv_begin: NDArray[np.int64],
    kv_end: NDArray[np.int64],
    split_len: int,
    block_n: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Records of the splits of each decode row, longest first, and of the rows to merge.

    row, query: [rows] place in the batch and in ``q``. kv_begin, kv_end: [rows] visible positions.
    Splits of a row are even and begin at multiples of ``block_n`` (but for the first), so that they
    take whole steps and stay within pages.
    """
    base = kv_begin // block_n * block_n
    splits = _ceil_div(kv_end - base, split_len)
    # Even lengths: a tile of a few leftover keys would cost a partial result for nothing.
    length = _ceil_div(_ceil_div(kv_end - base, splits), block_n) * block_n
    splits = _ceil_div(kv_end - base, length)
    merged = splits > 1
    partials = np.where(merged, splits, 0)
    first_partial = np.cumsum(partials) - partials

    unit = np.repeat(np.arange(len(row)), splits)
    split = np.arange(len(unit)) - np.repeat(np.cumsum(splits) - splits, splits)
    begin = base[unit] + split * length[unit]
    units = np.stack(
        (
            row[unit],
            query[unit],
            np.maximum(begin, kv_begin[unit]),
            np.minimum(begin + length[unit], kv_end[unit]),
            np.where(merged[unit], first_partial[unit] + split, -1),
        ),
        axis=1,
    ).astype(np.int32)
    merges = np.stack((query, first_partial, splits), axis=1)[merged].astype(np.int32)
    order = np.argsort(units[:, 2] - units[:, 3], kind="stable")
    return units[order], merges


def _ceil_div(value: NDArray[np.int64], by: NDArray[np.int64] | int) -> NDArray[np.int64]:
    return (value + by - 1) // by


def _upload(tables: Sequence[NDArray[np.int32]], device: torch.device) -> torch.Tensor:
    """The tables end to end, in one copy."""
    size = sum(table.size for table in tables)
    # Never empty, so that its address is one; the kernel reads nothing of it then.
    host = torch.zeros(max(1, size), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate([table.reshape(-1) for table in tables], out=host.numpy()[:size])
    return host.to(device, non_blocking=True)
