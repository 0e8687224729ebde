"""A trace as a stream of requests for modelled servers: cut into units, copied, routed.

A file in order of arrival is read anew for every pass and never held; one in another order is held
and sorted. To multiply a trace, its requests are held once as arrays and its copies are made on the
way: copy ``k`` has block ids of its own and begins a little later, so it is as many sessions again,
none of which shares anything with the others.
"""

from __future__ import annotations

import array
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.errors import ConfigError, TraceError
from sglang_tiered_lab.trace.replay.copies import Copies, CopiesBuilder, Row, mix
from sglang_tiered_lab.trace.replay.server import Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang_tiered_lab.trace.inputs import Input
    from sglang_tiered_lab.trace.request import TraceRequest


RETURNING_TOKENS = 1024
"""A request that shares this much with an earlier one is a returning turn: more than a system
prompt that everyone has. Also what ``prefix`` routes by."""

_REMEMBERED = 1 << 22  # prompts, by the fingerprint of their beginning; 32 MiB
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Survey:
    """Says what a pass over the file found; of the trace as replayed, copies included."""

    num_requests: int
    num_units: int
    num_unique_units: int
    num_tokens: int
    duration_s: float
    unit_tokens: int

    @property
    def unique_tokens(self) -> int:
        """Count the tokens as if every unit were full."""
        return self.num_unique_units * self.unit_tokens


class TraceStream:
    """``survey`` first, then ``routed`` as often as wanted."""

    def __init__(
        self,
        source: Input,
        *,
        page_tokens: int | None = None,
        stretch: float = 1.0,
        replicate: int = 1,
        spread_s: float = 0.0,
        num_servers: int = 1,
        route: str = "prefix",
    ) -> None:
        self._source = source
        self._held: list[TraceRequest] | None = None
        self._page_tokens = page_tokens
        self._stretch = stretch
        self._replicate = replicate
        self._spread_s = spread_s
        self._num_servers = num_servers
        self._route = route
        self._copies: Copies | None = None
        try:
            self.survey: Survey = self._survey()
        except _NotInOrderError:
            self._held = source.load_timed()
            self.survey = self._survey()
        source.report()

    @property
    def name(self) -> str:
        """Return the file's name, and what was made of it."""
        copies = f", {self._replicate} copies" if self._replicate > 1 else ""
        stretched = f", {self._stretch:g} times as slow" if self._stretch != 1 else ""
        return f"{self._source.path.name}{copies}{stretched}"

    def _survey(self) -> Survey:
        num_units = num_tokens = num_requests = 0
        first_s = last_s = 0.0
        unique = _Unique()
        builder = CopiesBuilder() if self._replicate > 1 else None
        self._unit_tokens = 0
        for row in self._rows():
            request = row.request
            first_s = request.arrival_s if num_requests == 0 else first_s
            last_s = request.arrival_s
            num_requests += 1
            num_units += len(request.units)
            num_tokens += request.input_tokens
            if builder is not None:
                builder.add(row)
            else:
                unique.add(request.units)
        if not num_requests:
            raise TraceError(f"{self._source.path} holds no request; there is nothing to replay.")
        copies = self._replicate
        if builder is not None:
            self._copies = builder.build(copies, self._spread_s)
        num_unique = unique.count() if self._copies is None else self._copies.num_unique
        return Survey(
            num_requests * copies,
            num_units * copies,
            num_unique * copies,
            num_tokens * copies,
            last_s - first_s + (self._spread_s * (copies - 1) / copies),
            self._unit_tokens,
        )

    def routed(self, servers: range) -> Iterator[tuple[int, Request]]:
        """Yield every request of these servers in order of arrival, with the server it goes to."""
        count = self._num_servers
        if self._copies is not None:
            yield from self._copies.routed(servers, count, in_turn=self._route == "round-robin")
            return
        for number, row in enumerate(self._rows()):
            server = number % count if self._route == "round-robin" else mix(row.key) % count
            if server in servers:
                yield server, row.request

    # ---- One pass over the file ----

    def _rows(self) -> Iterator[Row]:
        cutter: _Cutter | None = None
        seen = array.array("Q", bytes(8 * _REMEMBERED))
        last_s = -math.inf
        held = self._held
        for row in self._source.stream_timed() if held is None else held:
            if cutter is None:
                cutter = _Cutter(row.block_tokens, self._page_tokens)
                self._unit_tokens = cutter.unit_tokens
            if row.arrival_s is None:
                raise TraceError(
                    f"only some requests of {self._source.path} have times; give all of them one."
                )
            if row.arrival_s < last_s:
                raise _NotInOrderError
            last_s = row.arrival_s
            units = cutter.units(row)
            key = units[min(cutter.returning, len(units) - 1)] if units else 0
            returning = row.turn is not None and row.turn > 1
            if len(units) > cutter.returning:
                mixed = mix(key)
                slot = mixed % _REMEMBERED
                returning = returning or seen[slot] == mixed
                seen[slot] = mixed
            if self._route == "session" and row.conversation is not None:
                key = zlib.crc32(row.conversation.encode())
            request = Request(
                row.arrival_s * self._stretch,
                row.input_length,
                row.output_length,
                units,
                returning,
            )
            yield Row(request, key)


class _NotInOrderError(Exception):
    """A request comes before the one above it."""


class _Cutter:
    """Maps blocks of the trace to units of a server."""

    def __init__(self, block_tokens: int, page_tokens: int | None) -> None:
        self.unit_tokens = unit = block_tokens if page_tokens is None else page_tokens
        if unit % block_tokens and block_tokens % unit:
            raise ConfigError(
                f"--page-tokens {unit} does not fit the trace's blocks of {block_tokens} tokens; "
                "one must divide the other."
            )
        self._parts = block_tokens // unit  # 0 where a unit is several blocks
        self._blocks = unit // block_tokens
        self.returning = max(0, -(-RETURNING_TOKENS // unit) - 1)

    def units(self, row: TraceRequest) -> list[int]:
        ids = list(row.block_ids)
        if self._parts > 1:
            parts = range(self._parts)
            units = [(block * self._parts + part) & _MASK for block in ids for part in parts]
            return units[: -(-row.input_length // self.unit_tokens)]
        if self._blocks > 1:
            whole = ids[self._blocks - 1 :: self._blocks]
            return whole if len(ids) % self._blocks == 0 else [*whole, ids[-1]]
        return ids


class _Unique:
    """Counts different numbers; 8 to 16 bytes for each."""

    def __init__(self) -> None:
        self._known = np.empty(0, np.uint64)
        self._new = array.array("Q")

    def add(self, units: Sequence[int]) -> None:
        self._new.extend(units)
        if len(self._new) > max(1 << 22, len(self._known)):
            self._merge()

    def _merge(self) -> None:
        self._known = np.union1d(self._known, np.frombuffer(self._new, np.uint64))
        self._new = array.array("Q")

    def count(self) -> int:
        if self._new:
            self._merge()
        return len(self._known)
