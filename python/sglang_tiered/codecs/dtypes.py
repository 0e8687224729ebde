"""Converts elements of a page to numbers that numpy knows, and back: numpy has no bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

__all__ = [
    "FLOAT_DTYPES",
    "float32_to_bytes",
    "to_float32",
    "widened",
]

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
