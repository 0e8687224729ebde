"""The contract of a page codec, the layout that it needs, and elements as numbers.

A codec turns the bytes of one page into fewer bytes and back. The tiers below host memory may use
one; none is used unless asked for. The rules:

1. ``encode`` never fails and never loses more than the codec says. A page that it cannot express
   (another length than the layout's, a NaN, an infinity) is stored exactly, at the cost of a few
   bytes more than the page.
2. ``decode`` gives the page that was encoded, or raises ``CodecError``. It checks what the bytes
   say of themselves; it does not detect every flipped bit. The caller verifies a checksum over the
   encoded bytes first.
3. Pages of a lossy codec are never exact: whoever stores them mixes ``name`` into the namespace,
   which digests the layout too.
4. Both calls may run on any thread at any time, and hold the GIL only between array operations.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


Segments = tuple[memoryview, ...]
"""The segments of one page, in order; their concatenation is the page (``storage.base.Page``)."""

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
"""Bytes of one element, by torch's name of the type. ``uint8`` stands for opaque bytes."""

# SGLang's names of how a host pool orders the axes of a segment.
_ORDERS = {
    "page_first_direct": ("layer", "token", "head", "channel"),
    "page_first": ("token", "layer", "head", "channel"),
    "page_head": ("head", "token", "layer", "channel"),
}


class SegmentLayout(msgspec.Struct, frozen=True, array_like=True):
    """One array of a page: the names and lengths of its axes, slowest first. C-contiguous.

    Axes are ``layer``, ``token``, ``head`` and ``channel``, each at most once, channel always last.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class PageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How to read the bytes of a page. Without segments the layout is unknown, and only a lossless
    codec takes it; ``dtype`` then only says where elements begin."""

    dtype: str
    segments: tuple[SegmentLayout, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known are {', '.join(ITEM_BYTES)}")
        for segment in self.segments:
            if len(segment.axes) != len(segment.shape) or segment.axes[-1:] != ("channel",):
                raise ValueError(f"axes {segment.axes} do not fit shape {segment.shape}")
            if min(segment.shape) < 1:
                raise ValueError(f"a segment of shape {segment.shape} is empty")

    @classmethod
    def kv(
        cls,
        *,
        dtype: str,
        num_layers: int,
        page_size: int,
        num_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        order: str = "page_first_direct",
    ) -> PageLayout:
        """K, then V. ``order`` is a host pool's layout in SGLang's words; a ``layer_first`` page
        is K and V of the first layer, then of the next."""
        lengths = {"layer": num_layers, "token": page_size, "head": num_heads}
        dims = (head_dim, head_dim if v_head_dim is None else v_head_dim)
        if order == "layer_first":
            axes: tuple[str, ...] = ("token", "head", "channel")
            pair = tuple(SegmentLayout(axes, (page_size, num_heads, dim)) for dim in dims)
            return cls(dtype=dtype, segments=pair * num_layers)
        if order not in _ORDERS:
            raise ValueError(f"unknown order {order!r} of a page")
        axes = _ORDERS[order]
        shapes = (tuple(lengths.get(axis, dim) for axis in axes) for dim in dims)
        return cls(dtype=dtype, segments=tuple(SegmentLayout(axes, shape) for shape in shapes))

    @classmethod
    def latent(
        cls, *, dtype: str, num_layers: int, page_size: int, dim: int, order: str
    ) -> PageLayout:
        """One vector of ``dim`` channels per layer and token (MLA), shared by all heads."""
        whole = cls.kv(
            dtype=dtype,
            num_layers=num_layers,
            page_size=page_size,
            num_heads=1,
            head_dim=dim,
            order=order,
        )
        return cls(dtype=dtype, segments=whole.segments[::2])

    @classmethod
    def unknown(cls, dtype: str = "uint8") -> PageLayout:
        return cls(dtype=dtype)

    @property
    def is_known(self) -> bool:
        return bool(self.segments)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """The bytes of a page of a known layout; zero for an unknown one."""
        return sum(segment.num_elements for segment in self.segments) * self.item_bytes

    @property
    def digest(self) -> int:
        """32 bits that tell layouts apart, for a page's header. Too few for a namespace."""
        return int(xxhash.xxh32_intdigest(msgspec.msgpack.encode(self)))


FLOAT_DTYPES = ("float32", "float16", "bfloat16")
"""The formats that a lossy codec takes. An 8-bit cache is already as small."""


def to_float32(plain: Bytes, dtype: str) -> NDArray[np.float32]:
    """Elements as float32, which is exact. Float32 is not copied."""
    if dtype == "float32":
        return plain.view(np.float32)
    if dtype == "float16":
        return plain.view(np.float16).astype(np.float32)
    return widened(plain.view(np.uint16))


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers whose bits as bfloat16 these are."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bytes(values: NDArray[np.float32], dtype: str) -> Bytes:
    """Finite values rounded to the nearest of ``dtype``, ties to even, as flat bytes."""
    if dtype == "float16":
        return values.astype(np.float16).reshape(-1).view(np.uint8)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += bits
        rounded += np.uint32(0x7FFF)
        rounded >>= np.uint32(16)
        return rounded.astype(np.uint16).reshape(-1).view(np.uint8)
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
