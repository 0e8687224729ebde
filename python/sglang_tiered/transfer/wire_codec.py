"""KV in fewer bytes on the wire, for links that are slower than encoding. Off by default.

A codec works on one slab: for each of its buffer pairs, consecutive tokens of equally many bytes.
``int8`` is lossy: 256 even steps from the least to the largest value that a channel takes in the
slab's tokens. So an element errs by at most 1/510 of that range, and its rounding. Each channel of
keys has its own center, and the ranges of channels differ far more than those of tokens (Liu et
al., "KIVI", ICML 2024, arXiv 2402.02750). ``zstd`` is exact: it groups the bytes of each position
in an element, and compresses each such plane if that pays. A slab that a codec cannot express, or
would not make smaller, is sent as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.codecs.chunks import ChunkReader, pack_chunk
from sglang_tiered.codecs.dtypes import FLOAT_DTYPES, float32_to_bytes, to_float32
from sglang_tiered.codecs.encoded import copied
from sglang_tiered.errors import CodecError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.transfer.layout import Pair
    from sglang_tiered.transfer.memory import Bytes
    from sglang_tiered.transfer.messages import KVLayout

__all__ = ["CODECS", "PLAIN", "WireCodec", "make_codec"]

PLAIN = 0
"""``Slab.codec`` of a payload that is not encoded."""

CODECS = ("none", "int8", "zstd")

MIN_SAVING = 0.03
"""A slab is sent compressed only if that saves this share of it."""

BLOCK_ELEMENTS = 1 << 15

MIN_STEP = np.float32(1e-37)
"""A channel with a smaller step counts as constant: the inverse would not be finite."""

LEVELS = np.float32(255)


class _SlabPart(NamedTuple):
    """The share of one buffer pair in a slab."""

    num_tokens: int
    token_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.token_bytes


class WireCodec(ABC):
    """One per endpoint, for its thread only. ``number`` is in the header of slabs that it encoded.

    Pages hold ``page_size`` tokens, elements ``item_bytes`` bytes.
    """

    number: int

    def __init__(self, page_size: int, item_bytes: int) -> None:
        self._page_size = page_size
        self._item_bytes = item_bytes

    def encode(self, plain: Bytes, pairs: Sequence[Pair], num_pages: int) -> Bytes | None:
        """The payload for a slab of whole pages; None to send it as it is."""
        parts = self._parts(pairs, num_pages)
        encoded = None if parts is None else self._encode(plain, parts)
        is_worth_it = encoded is not None and encoded.nbytes <= (1 - MIN_SAVING) * plain.nbytes
        return encoded if is_worth_it else None

    def decode(self, data: Bytes, pairs: Sequence[Pair], num_pages: int) -> Bytes:
        """The slab's bytes. Raises ``TransferError`` for data that ``encode`` never makes."""
        parts = self._parts(pairs, num_pages)
        if parts is None:
            raise TransferError("prefill encoded pages that are not whole elements per token.")
        return self._decode(data, parts)

    def _parts(self, pairs: Sequence[Pair], num_pages: int) -> list[_SlabPart] | None:
        if any(pair.page_bytes % (self._page_size * self._item_bytes) for pair in pairs):
            return None
        num_tokens = num_pages * self._page_size
        return [_SlabPart(num_tokens, pair.page_bytes // self._page_size) for pair in pairs]

    @abstractmethod
    def _encode(self, plain: Bytes, parts: Sequence[_SlabPart]) -> Bytes | None: ...

    @abstractmethod
    def _decode(self, data: Bytes, parts: Sequence[_SlabPart]) -> Bytes: ...


def make_codec(layout: KVLayout) -> WireCodec | None:
    """The codec of the layout; None for plain bytes. Raises ``TransferError`` for a codec that is
    unknown, or that does not know the layout's elements."""
    if layout.codec == "none":
        return None
    if layout.codec == "int8" and layout.element in FLOAT_DTYPES:
        return _Int8(layout.page_size, layout.element)
    if layout.codec == "zstd":
        return _Zstd(layout.page_size, _item_bytes(layout.element))
    raise TransferError(
        f"--transfer-codec {layout.codec} cannot be used with a KV cache of {layout.dtype} "
        f"({layout.element or 'not a float of 2 or 4 bytes'}); drop it."
    )


class _Int8(WireCodec):
    """Writes per part the least value and the step of each channel as float32, then the codes."""

    number = 1

    def __init__(self, page_size: int, element: str) -> None:
        super().__init__(page_size, _item_bytes(element))
        self._element = element

    def _encode(self, plain: Bytes, parts: Sequence[_SlabPart]) -> Bytes | None:
        encoded = np.empty(sum(self._encoded_bytes(part) for part in parts), np.uint8)
        begin = at = 0
        for part in parts:
            values = to_float32(plain[begin : begin + part.num_bytes], self._element)
            values = values.reshape(part.num_tokens, -1)
            low = values.min(axis=0)
            with np.errstate(over="ignore", invalid="ignore"):
                step = (values.max(axis=0) - low) / LEVELS
            if not np.isfinite(step).all():
                return None
            step[step < MIN_STEP] = 0
            begin += part.num_bytes
            for ranges in (low, step):
                encoded[at : at + ranges.nbytes] = ranges.view(np.uint8)
                at += ranges.nbytes
            codes = encoded[at : at + values.size].reshape(values.shape)
            at += values.size
            per_unit = np.float32(1) / np.where(step == 0, np.float32(1), step)
            for block in _blocks(values.shape):
                scaled = values[block] - low
                scaled *= per_unit
                scaled += np.float32(0.5)
                np.copyto(codes[block], scaled, casting="unsafe")  # truncates; nothing is below 0
        return encoded

    def _decode(self, data: Bytes, parts: Sequence[_SlabPart]) -> Bytes:
        size = sum(self._encoded_bytes(part) for part in parts)
        if data.nbytes != size:
            raise TransferError(f"prefill sent {data.nbytes} bytes of int8 for a slab of {size}.")
        plain = np.empty(sum(part.num_bytes for part in parts), np.uint8)
        begin = at = 0
        for part in parts:
            channels = part.token_bytes // self._item_bytes
            ranges = data[at : at + 8 * channels].copy().view("<f4").reshape(2, channels)
            at += 8 * channels
            codes = data[at : at + part.num_tokens * channels].reshape(part.num_tokens, channels)
            at += codes.size
            for block in _blocks(codes.shape):
                values = codes[block].astype(np.float32)
                values *= ranges[1]
                values += ranges[0]
                raw = float32_to_bytes(values, self._element)
                plain[begin : begin + raw.nbytes] = raw
                begin += raw.nbytes
        return plain

    def _encoded_bytes(self, part: _SlabPart) -> int:
        channels = part.token_bytes // self._item_bytes
        return channels * (8 + part.num_tokens)


class _Zstd(WireCodec):
    """Writes a chunk (see ``codecs.chunks``) per byte plane of the whole slab."""

    number = 2

    def _encode(self, plain: Bytes, parts: Sequence[_SlabPart]) -> Bytes | None:
        elements = plain.reshape(-1, self._item_bytes)
        planes = (np.ascontiguousarray(elements[:, i]) for i in range(self._item_bytes))
        return copied([part for plane in planes for part in pack_chunk(plane)])

    def _decode(self, data: Bytes, parts: Sequence[_SlabPart]) -> Bytes:
        plain = np.empty(sum(part.num_bytes for part in parts), np.uint8)
        elements = plain.reshape(-1, self._item_bytes)
        reader = ChunkReader(data.data)
        try:
            for index in range(self._item_bytes):
                elements[:, index] = reader.chunk(len(elements))
            reader.finish()
        except CodecError as error:
            raise TransferError(f"prefill sent a slab that zstd did not make: {error}.") from error
        return plain


def _blocks(shape: tuple[int, ...]) -> list[slice]:
    """Slices of tokens, small enough that their codes stay in the processor's cache."""
    step = max(1, BLOCK_ELEMENTS // shape[1])
    return [slice(start, start + step) for start in range(0, shape[0], step)]


def _item_bytes(element: str) -> int:
    return {"float32": 4, "": 1}.get(element, 2)
