"""Keys as words of 8 bytes, and the hash of them that the index places its rows by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["hash_words", "key_words"]

_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)


def key_words(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Keys of 32 bytes as an array ``[keys, 4]``."""
    return np.frombuffer(b"".join(keys), "<u8").reshape(-1, 4)


def hash_words(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed: npt.NDArray[np.uint64] = (words * _MULTIPLIERS).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MULTIPLIERS[0]
    return mixed ^ (mixed >> np.uint64(29))
