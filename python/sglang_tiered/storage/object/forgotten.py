"""Which pages were forgotten one by one: by key, up to when an object that holds them does not
count. Pure.

A page is dead in every object that was opened up to the bound of its key. One that is stored again
goes into an object that is opened later, by its name at least.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from sglang_tiered.storage.object.format import Manifest

__all__ = ["MAX_FORGOTTEN", "Forgotten"]

MAX_FORGOTTEN = 1 << 19
"""Some 150 bytes each. Beyond it the half with the lesser bounds is replaced by a purge of
everything that was opened up to the last of these."""


class Forgotten:
    """Bounds by key, in ms since 1970. The owner's lock guards every call."""

    def __init__(self, max_keys: int = MAX_FORGOTTEN) -> None:
        self._max_keys = max_keys
        self._bounds: dict[bytes, int] = {}
        self._num_keys: Counter[int] = Counter()  # by bound
        self._latest_ms = -1

    def __len__(self) -> int:
        return len(self._bounds)

    def of(self, key: bytes) -> int:
        """Return up to when objects do not count for that page; -1 where it was not forgotten."""
        return self._bounds.get(key, -1)

    def latest(self, keys: Iterable[bytes]) -> int:
        return max(map(self.of, keys), default=-1)

    def add(self, keys: Iterable[bytes], bound_ms: int) -> list[bytes]:
        """Raise the bounds of keys; returns those of which this says anything new."""
        news = [key for key in keys if self._bounds.get(key, -1) < bound_ms]
        for key in news:
            self._uncount(self._bounds.get(key, -1))
            self._bounds[key] = bound_ms
        if news:
            self._num_keys[bound_ms] += len(news)
            self._latest_ms = max(self._latest_ms, bound_ms)
        return news

    def fold(self) -> int:
        """Drop the lesser half when there are too many; returns the bound they are all up to, else
        -1."""
        if len(self._bounds) <= self._max_keys:
            return -1
        by_bound = sorted(self._bounds, key=self._bounds.__getitem__)
        last = self._bounds[by_bound[len(by_bound) // 2]]
        self._drop({bound for bound in self._num_keys if bound <= last})
        return last

    def keep_only(self, bounds: set[int], since_ms: int) -> None:
        """Drop the keys whose bounds are none of these and lie before ``since_ms``."""
        self._drop({bound for bound in self._num_keys if bound < since_ms} - bounds)

    def dead(self, manifest: Manifest) -> npt.NDArray[np.bool_]:
        """Return which pages of an object do not count."""
        pages, opened = manifest.pages, manifest.object_id.unix_ms
        if opened > self._latest_ms:
            return np.zeros(len(pages), np.bool_)
        keys = np.ascontiguousarray(pages["key"]).tobytes()
        size = pages["key"].dtype.itemsize
        return np.fromiter(
            (self.of(keys[at : at + size]) >= opened for at in range(0, len(keys), size)),
            np.bool_,
            len(pages),
        )

    def _drop(self, bounds: set[int]) -> None:
        if bounds:
            self._bounds = {key: b for key, b in self._bounds.items() if b not in bounds}
            self._num_keys = Counter({b: n for b, n in self._num_keys.items() if b not in bounds})
            self._latest_ms = max(self._num_keys, default=-1)

    def _uncount(self, bound_ms: int) -> None:
        if bound_ms in self._num_keys:
            self._num_keys[bound_ms] -= 1
            if not self._num_keys[bound_ms]:
                del self._num_keys[bound_ms]
