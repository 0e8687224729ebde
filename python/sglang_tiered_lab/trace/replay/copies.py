"""A trace multiplied: held once as arrays, its copies made on the way."""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered_lab.trace.replay.server import Request

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt


_WINDOW_REQUESTS = 200_000
_MASK = (1 << 64) - 1
_COPY = 0xD1B54A32D192ED03


class Row(NamedTuple):
    """Holds a request of the trace, and what to route it by."""

    request: Request
    key: int


def mix(number: int) -> int:
    """64 well-mixed bits of a number (the finalizer of MurmurHash3, public domain)."""
    number &= _MASK
    number = (number ^ (number >> 33)) * 0xFF51AFD7ED558CCD & _MASK
    number = (number ^ (number >> 33)) * 0xC4CEB9FE1A85EC53 & _MASK
    return number ^ (number >> 33)


def _mix_all(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    shift = np.uint64(33)
    numbers = (numbers ^ (numbers >> shift)) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ (numbers >> shift)) * np.uint64(0xC4CEB9FE1A85EC53)
    mixed: npt.NDArray[np.uint64] = numbers ^ (numbers >> shift)
    return mixed


class CopiesBuilder:
    def __init__(self) -> None:
        self._times = array.array("d")
        self._inputs, self._outputs = array.array("Q"), array.array("Q")
        self._returning = array.array("B")
        self._keys = array.array("Q")
        self._offsets = array.array("Q", [0])
        self._units = array.array("Q")

    def add(self, row: Row) -> None:
        request = row.request
        self._times.append(request.arrival_s)
        self._inputs.append(request.input_tokens)
        self._outputs.append(request.output_tokens)
        self._returning.append(request.returning)
        self._keys.append(row.key)
        self._units.extend(request.units)
        self._offsets.append(len(self._units))

    def build(self, num_copies: int, spread_s: float) -> Copies:
        unique, dense = np.unique(np.array(self._units, np.uint64), return_inverse=True)
        return Copies(
            np.array(self._times),
            self._inputs.tolist(),
            self._outputs.tolist(),
            [bool(flag) for flag in self._returning],
            np.array(self._keys, np.uint64),
            self._offsets.tolist(),
            dense.astype(np.int64),
            len(unique),
            num_copies,
            spread_s,
        )


@dataclass
class Copies:
    """One copy of the trace, held, and how many there are to be."""

    times: npt.NDArray[np.float64]
    inputs: list[int]
    outputs: list[int]
    returning: list[bool]
    keys: npt.NDArray[np.uint64]
    offsets: list[int]
    units: npt.NDArray[np.int64]
    num_unique: int
    num_copies: int
    spread_s: float

    def routed(self, servers: range, count: int, *, in_turn: bool) -> Iterator[tuple[int, Request]]:
        """The requests of these servers, of ``count``, in order of arrival. A window of time is
        made at once: what is done for every request takes arrays, not objects."""
        copies = self.num_copies
        shifts = np.arange(copies) * (self.spread_s / copies)
        span_s = float(self.times[-1] - self.times[0])
        end_s = float(self.times[-1] + shifts[-1])
        per_second = len(self.times) * copies / max(1e-9, span_s + float(shifts[-1]))
        step_s = max(1e-6, _WINDOW_REQUESTS / per_second)
        begin_s, number = float(self.times[0]), 0
        while begin_s <= end_s:
            stop_s = begin_s + step_s
            first = np.searchsorted(self.times, begin_s - shifts)
            counts = np.searchsorted(self.times, stop_s - shifts) - first
            copy = np.repeat(np.arange(copies), counts)
            row = np.arange(len(copy)) - np.repeat(np.cumsum(counts) - counts - first, counts)
            begin_s = stop_s
            if not len(row):
                continue
            arrivals = self.times[row] + shifts[copy]
            order = np.argsort(arrivals, kind="stable")
            row, copy, arrivals = row[order], copy[order], arrivals[order]
            if in_turn:
                server = np.arange(number, number + len(row)) % count
            else:
                shifted = self.keys[row] + copy.astype(np.uint64) * np.uint64(_COPY)
                server = (_mix_all(shifted) % np.uint64(count)).astype(np.int64)
            number += len(row)
            if len(servers) < count:
                mine = (server >= servers.start) & (server < servers.stop)
                row, copy, arrivals, server = row[mine], copy[mine], arrivals[mine], server[mine]
            rows = zip(server.tolist(), row.tolist(), copy.tolist(), arrivals.tolist(), strict=True)
            for to, i, k, arrival_s in rows:
                units = self.units[self.offsets[i] : self.offsets[i + 1]] + k * self.num_unique
                yield (
                    to,
                    Request(
                        arrival_s,
                        self.inputs[i],
                        self.outputs[i],
                        units.tolist(),
                        self.returning[i],
                    ),
                )
