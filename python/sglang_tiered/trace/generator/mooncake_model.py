"""Requests like those of the Mooncake conversation trace (Qin et al., FAST 2025).

The shape follows the generator recipe of this project's survey of workloads: conversations begin as
a Poisson process; each goes on with a chance that grows with its turns; a next turn comes after a
lognormal gap and keeps the full blocks of the prompt before it, unless the user edited it; one
system block is shared by all, a second one by the users of a tenant, tenants drawn by Zipf's law.

Every number below was computed from the published file (conversation.jsonl of the FAST25 release),
turns inferred as ``trace.sessions`` does, except where it says "fitted": chosen so that the figures
in ``fidelity`` come out. The file itself is not needed.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.trace.generator.draws import Draws, Quantiles
from sglang_tiered.trace.mooncake import BLOCK_TOKENS
from sglang_tiered.trace.request import TraceRequest, num_blocks_for
from sglang_tiered.trace.sessions import MIN_SHARED_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CONVERSATIONS_PER_S", "NUM_CONVERSATIONS", "requests"]

CONVERSATIONS_PER_S = 2.24  # 12,031 requests in 3,537 s, 65.9% of them first turns
NUM_CONVERSATIONS = 7928

# Chance that turn n is followed by another, among requests of the first half of the trace, so that
# few are cut off by its end.
_GOES_ON = (0.291, 0.442, 0.567, 0.623, 0.677, 0.727, 0.76, 0.76, 0.8, 0.88, 0.94)

_SHARES = (0, 0.05, 0.1, 0.25, 0.4, 0.5, 0.75, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1)


def _by_share(*values: float) -> Quantiles:
    return Quantiles(dict(zip(_SHARES, values, strict=True)))


# fmt: off
_FIRST_INPUT_ALONE = _by_share(
    891, 896, 901, 1082, 1729, 4122, 11042, 23707, 37450, 51590, 66876, 89658, 111529, 126195
)
_FIRST_INPUT_FOLLOWED = _by_share(
    1537, 1746, 2037, 4214, 6072, 7854, 15868, 26953, 36058, 48195, 58611, 76425, 98793, 122891
)
_GROWTH_SECOND = _by_share(
    -1500, -300, 24, 294, 420, 512, 2162, 5952, 9028, 12000, 15199, 20000, 26000, 45000
)
_GROWTH_LATER = _by_share(
    -1500, -300, 5, 160, 330, 436, 735, 2400, 5000, 7000, 9000, 11500, 14000, 25000
)
# fmt: on
_OUTPUT = Quantiles({0: 1, 0.1: 24, 0.25: 156, 0.5: 350, 0.75: 472, 0.9: 597, 0.99: 1119, 1: 2000})
_LONGEST_INPUT = 126_195

# A gap is this much and a lognormal rest; fitted to the published quartiles 69, 126 and 267 s.
_GAP_LEAST_S = 20.0
_GAP_MEDIAN_S = 125.0
_GAP_SIGMA = 1.25
_LATE_GAP_MEDIAN_S = 66.0
_LATE_TURN = 8
_TICK_S = 3.0  # the file's times are multiples of it

# A next turn of a long prompt may keep less than its full blocks: the user edited it, or the
# application cut it. 11% of next turns in all.
_EDITED_FROM_BLOCKS = 20  # fitted
_EDITED = 0.28  # fitted
_GROWTH_EDITED = Quantiles(
    {0: -20000, 0.1: -7272, 0.25: -3562, 0.5: 59, 0.75: 1480, 0.9: 4854, 1: 15000}
)
_EDITED_KEEPS = Quantiles({0: 0.04, 0.25: 0.12, 0.5: 0.24, 0.75: 0.6, 1: 0.97})  # of its blocks

_TENANT = 0.11  # conversations that share a second block with others; fitted to 4.6% of requests
_NUM_TENANTS = 600  # fitted
_ZIPF = 0.6  # fitted


class _Turn(NamedTuple):
    time: float
    conversation: int  # and the turn, to order equal times
    turn: int
    request: TraceRequest


class _Model:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._next_block = 1  # block 0 is everybody's
        self._tenants = list(
            itertools.accumulate(rank**-_ZIPF for rank in range(1, _NUM_TENANTS + 1))
        )
        self._tenant_blocks: dict[int, int] = {}

    def conversation(self, number: int, start: float) -> Iterator[_Turn]:
        draws = Draws(self._seed, number)
        num_turns = 1
        while draws.happens(_GOES_ON[min(num_turns, len(_GOES_ON)) - 1]):
            num_turns += 1
        first = _FIRST_INPUT_ALONE if num_turns == 1 else _FIRST_INPUT_FOLLOWED
        length = max(1, round(draws.of(first)))
        shared = [0]
        if draws.happens(_TENANT):
            shared.append(self._tenant_block(draws.index(self._tenants)))
        blocks = self._grown(shared, length)
        time = start
        for turn in range(1, num_turns + 1):
            if turn > 1:
                median = _GAP_MEDIAN_S if turn < _LATE_TURN else _LATE_GAP_MEDIAN_S
                time += _GAP_LEAST_S + draws.lognormal(median, _GAP_SIGMA)
                kept = blocks[: length // BLOCK_TOKENS]
                growth = _GROWTH_SECOND if turn == 2 else _GROWTH_LATER
                if len(kept) >= _EDITED_FROM_BLOCKS and draws.happens(_EDITED):
                    keeps = round(draws.of(_EDITED_KEEPS) * len(kept))
                    kept = kept[: max(MIN_SHARED_BLOCKS, keeps)]
                    growth = _GROWTH_EDITED
                length = round(length + draws.of(growth))
                length = min(max(length, MIN_SHARED_BLOCKS * BLOCK_TOKENS), _LONGEST_INPUT)
                blocks = self._grown(kept, length)
            request = TraceRequest(
                arrival_s=time // _TICK_S * _TICK_S,
                input_length=length,
                output_length=round(draws.of(_OUTPUT)),
                block_ids=tuple(blocks),
                block_tokens=BLOCK_TOKENS,
                conversation=f"c{number}",
                turn=turn,
            )
            yield _Turn(time, number, turn, request)

    def _tenant_block(self, tenant: int) -> int:
        if tenant not in self._tenant_blocks:
            self._tenant_blocks[tenant] = self._new()
        return self._tenant_blocks[tenant]

    def _grown(self, kept: list[int], length: int) -> list[int]:
        """Blocks of a prompt of that length which begins with those kept, as far as it goes."""
        num_blocks = num_blocks_for(length, BLOCK_TOKENS)
        blocks = kept[:num_blocks]
        return blocks + [self._new() for _ in range(num_blocks - len(blocks))]

    def _new(self) -> int:
        self._next_block += 1
        return self._next_block - 1


def requests(
    seed: int,
    num_conversations: int = NUM_CONVERSATIONS,
    conversations_per_s: float = CONVERSATIONS_PER_S,
) -> Iterator[TraceRequest]:
    """In order of arrival; what would come after the last conversation has begun is cut off, as it
    is in a recorded trace. Holds the turns to come of conversations that have begun."""
    model = _Model(seed)
    starts = Draws(seed)
    end = num_conversations / conversations_per_s
    waiting: list[_Turn] = []
    start, number = 0.0, 0
    while start < end and number < num_conversations:
        while waiting and waiting[0].time <= start:
            yield heapq.heappop(waiting).request
        for turn in model.conversation(number, start):
            if turn.time < end:
                heapq.heappush(waiting, turn)
        number += 1
        start += starts.exponential(1 / conversations_per_s)
    while waiting:
        yield heapq.heappop(waiting).request
