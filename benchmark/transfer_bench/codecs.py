"""What a wire codec costs on one core, what it saves, and how far off what comes back is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from sglang_tiered.codecs.base import float32_to_bytes, to_float32
from sglang_tiered.codecs.encoded import copied
from sglang_tiered.config import TRANSFER_CODECS
from sglang_tiered.transfer.layout import slab_codec
from sglang_tiered.transfer.memory import SlabPiece
from transfer_bench.pools import Pool, Shape

SLAB_PAGES = 4  # of 64 tokens: what a slab of one buffer has


@dataclass
class CodecSamples:
    """GB/s of plain bytes, round by round; plain bytes over sent ones; the largest error as a
    share of the range of its channel."""

    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    saving: float = 1.0
    error: float = 0.0


def measure(num_rounds: int) -> dict[str, CodecSamples]:
    """Of slabs whose channels have a level and a width of their own, in bfloat16."""
    shape = Shape(1, SLAB_PAGES)
    pieces = [SlabPiece(0, shape.page_bytes)]
    slabs = [_slab(shape, seed) for seed in range(16)]
    size = sum(slab.nbytes for slab in slabs) / 1e9
    found = {name: CodecSamples() for name in TRANSFER_CODECS[1:]}
    layout = Pool(shape, filled=False).layout
    for _ in range(num_rounds):
        for name, samples in found.items():
            layout = msgspec.structs.replace(layout, element="bfloat16", codec=name)
            codec: Any = slab_codec(layout, pieces, SLAB_PAGES)
            decoded = [np.empty_like(slab) for slab in slabs]
            begun = time.perf_counter()
            encoded = [copied(codec.encode((slab.data,))) for slab in slabs]
            sent = time.perf_counter()
            for data, plain in zip(encoded, decoded, strict=True):
                codec.decode(data.data, (plain.data,))
            ended = time.perf_counter()
            samples.encode.append(size / (sent - begun))
            samples.decode.append(size / (ended - sent))
            samples.saving = size * 1e9 / sum(data.nbytes for data in encoded)
            samples.error = max(map(_error, slabs, decoded))
    return found


def _slab(shape: Shape, seed: int) -> Any:
    source = np.random.default_rng(seed)
    channels = shape.page_bytes // shape.page_size // 2
    level = source.normal(0, 2, channels)
    width = source.lognormal(0, 1, channels)
    values = level + width * source.normal(0, 1, (SLAB_PAGES * shape.page_size, channels))
    return float32_to_bytes(values.astype(np.float32), "bfloat16")


def _error(before: Any, after: Any) -> float:
    tokens = SLAB_PAGES * 64
    old, new = (to_float32(data, "bfloat16").reshape(tokens, -1) for data in (before, after))
    return float((np.abs(new - old).max(axis=0) / (old.max(axis=0) - old.min(axis=0))).max())
