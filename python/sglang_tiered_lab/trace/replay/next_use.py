"""When each part of each prompt is asked for next: what Belady's bound needs to know of the future.

A unit's next use is a request. The units of one prompt that a later request asks for next are a
contiguous part of it, so what has to be kept per request is a few pairs of a later request and a
number of tokens. They are found by sorting: accesses are split over files by unit, each file is
sorted in memory, and neighbours of the same unit make a pair. Memory is bounded by one file of each
kind, whatever the trace.
"""

from __future__ import annotations

import array
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import numpy.typing as npt


_NUM_FILES = 64
_BUFFERED = 2_000_000  # accesses
_REQUESTS_PER_FILE = 1 << 20

_ACCESS = np.dtype([("unit", "<u8"), ("request", "<u4"), ("tokens", "<u4")])
_PAIR = np.dtype([("request", "<u4"), ("next", "<u4"), ("tokens", "<u4")])


class NextUse:
    """``add`` every request in order, ``finish``, then read ``runs`` as often as wanted. A context:
    its files go when it ends."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="sglang-tiered-replay-")
        self._path = Path(self._directory.name)
        self._units = array.array("Q")
        self._requests = array.array("I")
        self._tokens = array.array("I")
        self._num_requests = 0
        self._files: set[int] = set()

    def __enter__(self) -> NextUse:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._directory.cleanup()

    def add(self, units: Sequence[int], lengths: Sequence[int], server: int) -> None:
        """Return the next request: its units, their tokens, and the server that has its own
        tiers."""
        if server:
            mask = server * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            units = [unit ^ mask for unit in units]
        self._units.extend(units)
        self._requests.extend([self._num_requests] * len(units))
        self._tokens.extend(lengths)
        self._num_requests += 1
        if len(self._units) >= _BUFFERED:
            self._flush()

    def finish(self) -> None:
        self._flush()
        for number in sorted(self._files):
            path = self._path / f"accesses-{number}"
            self._pair_up(np.fromfile(path, _ACCESS))
            path.unlink()

    def _flush(self) -> None:
        accesses = np.empty(len(self._units), _ACCESS)
        accesses["unit"], accesses["request"] = self._units, self._requests
        accesses["tokens"] = self._tokens
        self._units, self._requests = array.array("Q"), array.array("I")
        self._tokens = array.array("I")
        mixed = accesses["unit"] * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(58)
        self._append("accesses", accesses, mixed.astype(np.int64))

    def _append(
        self, kind: str, rows: npt.NDArray[np.void], numbers: npt.NDArray[np.int64]
    ) -> None:
        order = np.argsort(numbers, kind="stable")
        bounds = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        for start, stop in zip(bounds, [*bounds[1:], len(order)], strict=True):
            number = int(numbers[order[start]])
            with (self._path / f"{kind}-{number}").open("ab") as file:
                rows[order[start:stop]].tofile(file)
            if kind == "accesses":
                self._files.add(number)

    def _pair_up(self, accesses: npt.NDArray[np.void]) -> None:
        """Neighbours of one unit, in order of their requests, summed up by pair of requests."""
        accesses = accesses[np.argsort(accesses["unit"], kind="stable")]
        same = accesses["unit"][1:] == accesses["unit"][:-1]
        earlier, later = accesses[:-1][same], accesses[1:][same]
        if not len(earlier):
            return
        keys = earlier["request"].astype(np.uint64) << np.uint64(32) | later["request"]
        keys, rows = np.unique(keys, return_inverse=True)
        pairs = np.empty(len(keys), _PAIR)
        pairs["request"] = keys >> np.uint64(32)
        pairs["next"] = keys & np.uint64(0xFFFFFFFF)
        pairs["tokens"] = np.bincount(rows, weights=later["tokens"])
        self._append("pairs", pairs, pairs["request"].astype(np.int64) // _REQUESTS_PER_FILE)

    def runs(self) -> Iterator[list[tuple[int, int]]]:
        """For every request in order: later requests, and how many of its tokens each asks for
        before any other does."""
        for first in range(0, self._num_requests, _REQUESTS_PER_FILE):
            path = self._path / f"pairs-{first // _REQUESTS_PER_FILE}"
            pairs = np.fromfile(path, _PAIR) if path.exists() else np.empty(0, _PAIR)
            pairs = pairs[np.argsort(pairs["request"], kind="stable")]
            last = min(first + _REQUESTS_PER_FILE, self._num_requests)
            bounds = np.searchsorted(pairs["request"], np.arange(first, last + 1)).tolist()
            nexts, tokens = pairs["next"].tolist(), pairs["tokens"].tolist()
            for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
                yield list(zip(nexts[start:stop], tokens[start:stop], strict=True))
