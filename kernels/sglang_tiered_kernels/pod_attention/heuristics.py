"""Tile sizes, their expected cost, and when one launch is worth more than two.

The rates below only rank choices: they decide ratios, the schedule and the gate, never a result.
Measured on an H100 (2026-11-27); another device has others, in about the same proportion.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered_kernels.pod_attention.shape import PodShape, Schedule

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Sustained rates of the whole device: matrix products of a plain Triton tile, and memory reads.
_MATMUL_FLOPS = 420e12
_MEMORY_BYTES = 2.9e12
# A decode tile's products are padded to 16 rows and run at a lower rate than prefill's.
_DECODE_MATMUL_FLOPS = 150e12
# Each role must be at least this share of the serial estimate. Below it there is too little of one
# role to hide behind the other, and a fused launch can only lose (FlashInfer's issue 1022).
_MIN_SHARE = 0.15
# On an H100 persistent blocks were 4 to 8 % faster where prefill was below this share of the
# estimate, and as often slower as faster where it was above.
_MAX_PERSISTENT_SHARE = 1 / 3
# Decode tiles wanted per SM before rows are no longer split, and the bounds of a split in tokens.
_DECODE_TILES_PER_SM = 4
_MIN_SPLIT, _MAX_SPLIT = 256, 2048
# Tickets of one role in a period, at most.
_MAX_TICKETS = 64


@dataclass(frozen=True)
class PodConfig:
    """How a launch is cut and compiled.

    block_m: query tokens of a prefill tile. block_n, block_n_decode: keys per step of a tile's
    loop. All three are powers of two from 16 up. num_warps: of the fused and the prefill launch; a
    thread block has one number for both roles. Stages: depth of the loops' software pipelines.
    decode_warps: of a launch of decode tiles alone. split_len: tokens of a decode row that one tile
    reads at most, a multiple of block_n_decode; 0 to choose it for each batch. ctas_per_sm: thread
    blocks that fit on an SM, which a persistent launch fills and ``test_compile_all.py`` asserts.
    """

    name: str
    block_m: int = 64
    block_n: int = 64
    block_n_decode: int = 64
    num_warps: int = 4
    prefill_stages: int = 3
    decode_stages: int = 3
    decode_warps: int = 4
    split_len: int = 0
    ctas_per_sm: int = 2


# Letters as in results. ``choose_config`` returns any, so a server compiles all before it serves.
CONFIGS: dict[str, PodConfig] = {
    config.name: config
    for config in (
        PodConfig("A", block_m=64, block_n=64, num_warps=4),
        PodConfig("D", block_m=64, block_n=32, block_n_decode=32, num_warps=4, ctas_per_sm=3),
    )
}
_DEFAULT_CONFIG, _SHORT_CONFIG = CONFIGS.values()


def choose_config(longest_extend: int) -> PodConfig:
    """The shipped configuration for a batch by its longest chunk: the fastest of four on an H100,
    except that chunks below half a tile of it take narrower steps."""
    return _SHORT_CONFIG if 2 * longest_extend <= _DEFAULT_CONFIG.block_m else _DEFAULT_CONFIG


def choose_split_len(kv_tokens: int, shape: PodShape, num_sms: int, block_n_decode: int) -> int:
    """Tokens per decode tile: the largest power of two that still gives every SM several tiles.

    kv_tokens: keys of all decode rows together, each counted once.
    """
    wanted_units = max(1, -(-_DECODE_TILES_PER_SM * num_sms // shape.num_kv_heads))
    split = max(1, kv_tokens // wanted_units)
    split = 1 << (split.bit_length() - 1)
    return max(block_n_decode, min(_MAX_SPLIT, max(_MIN_SPLIT, split)))


def prefill_tile_s(
    steps: NDArray[np.int64], shape: PodShape, config: PodConfig
) -> NDArray[np.float64]:
    """Estimated device-seconds of prefill tiles with these numbers of steps of ``block_n`` keys."""
    step_s = 4 * config.block_m * config.block_n * shape.head_dim / _MATMUL_FLOPS
    return (steps * step_s).astype(np.float64)


def decode_tile_s(tokens: NDArray[np.int64], shape: PodShape) -> NDArray[np.float64]:
    """Estimated device-seconds of decode tiles that read these numbers of keys of one KV head."""
    rows = max(16, shape.group)
    memory_s = shape.kv_token_bytes / shape.num_kv_heads / _MEMORY_BYTES
    matmul_s = 4 * rows * shape.head_dim / _DECODE_MATMUL_FLOPS
    return (tokens * max(memory_s, matmul_s)).astype(np.float64)


def role_s(tile_s: NDArray[np.float64], heads: int, num_sms: int) -> float:
    """Estimated seconds of a role alone. tile_s: device-seconds of a tile of each unit, which runs
    once per head. A role with fewer tiles than SMs takes as long as its longest tile."""
    return max(float(tile_s.sum()) * heads, float(tile_s.max(initial=0)) * num_sms)


def worth_fusing(prefill_s: float, decode_s: float) -> bool:
    """The gate: whether each role is enough of the serial estimate for the other to hide."""
    return min(prefill_s, decode_s) >= _MIN_SHARE * (prefill_s + decode_s) > 0


def choose_schedule(prefill_s: float, decode_s: float) -> Schedule:
    """How a fused launch of these estimates gives out its tiles. Where reading keys takes most of
    the time there are many short tiles, and starting a block for each is what persistence saves."""
    few = prefill_s < _MAX_PERSISTENT_SHARE * (prefill_s + decode_s)
    return Schedule.PERSISTENT if few else Schedule.TICKET


def ticket_ratio(prefill_tiles: int, decode_tiles: int) -> tuple[int, int]:
    """Tickets of a period for prefill and for decode tiles: small, coprime, both at least 1, and in
    the ratio of the tiles, so that both roles run dry together (the paper's)."""
    if not prefill_tiles or not decode_tiles:
        return 1, 1
    ratio = Fraction(prefill_tiles, decode_tiles)
    # Neither role is starved, and neither number outgrows the other's whole range.
    ratio = min(max(ratio, Fraction(1, _MAX_TICKETS)), Fraction(_MAX_TICKETS))
    small = min(ratio, 1 / ratio).limit_denominator(_MAX_TICKETS)
    pair = (small.numerator, small.denominator)
    return pair if ratio <= 1 else pair[::-1]
