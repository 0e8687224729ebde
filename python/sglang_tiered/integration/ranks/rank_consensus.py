"""What ranks agree on about measurements that differ between them, at no collective of its own.

Ranks of tensor parallelism must decide alike, but a rank's clock, its disk and what its shard
holds are its own. SGLang reduces a small tensor of queue lengths over all ranks in every scheduler
step, idle or not (``UnifiedRadixCache._sync_hicache_ready_counts``, by minimum). These values ride
in that tensor as a few more numbers (``boarding``, ``ride``). A float64 travels as an int64 of the
same order, so a minimum over ranks is exact to the bit; a rank that has nothing to say sends the
largest int64.

Used on the scheduler thread only. Every rank makes the same calls in the same order between two
exchanges, as SGLang demands of everything there, so all tensors have the same length.
"""

from __future__ import annotations

import enum
import math
import struct
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.utils.rank_consensus_checker import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

__all__ = ["RankAgreement", "Rule", "first_ranks", "groups_of", "least_on_every_rank"]

SILENT = torch.iinfo(torch.int64).max

_BYTES_SENT = 7  # of a number that is reduced
MAX_ANSWERS = 4096
"""Beyond this number unread answers are forgotten, oldest first."""


class Rule(enum.Enum):
    """Says which rank's value counts."""

    FIRST = "the first rank's"  # values that belong together, such as the terms of one estimate
    LARGEST = "the largest"  # what is as bad as on the worst rank: a cost, a delay, a failure


class RankAgreement:
    """Holds the standing values and the questions of one rank.

    ``initial`` are the standing values until ranks first agreed, the same on every rank; ``rules``
    say how each is agreed on. ``is_first``: whether this is the first rank. ``is_alone``: there is
    no other rank; then nothing is exchanged and every value is agreed on at once.
    """

    def __init__(
        self,
        initial: Sequence[float],
        rules: Sequence[Rule],
        *,
        is_first: bool,
        is_alone: bool,
    ) -> None:
        if len(initial) != len(rules):
            raise ValueError(f"{len(initial)} values under {len(rules)} rules")
        self._agreed = tuple(float(value) for value in initial)
        self._rules = tuple(rules)
        self._is_first = is_first
        self._is_alone = is_alone
        self._own: Sequence[float] = (math.nan,) * len(rules)
        self._questions: OrderedDict[Hashable, int] = OrderedDict()
        self._answers: OrderedDict[Hashable, int] = OrderedDict()
        self._is_boarding = False

    @classmethod
    def of_cache(
        cls, cache: UnifiedRadixCache, initial: Sequence[float], rules: Sequence[Rule]
    ) -> RankAgreement:
        """Create one for the ranks that SGLang's exchange reduces over."""
        groups = groups_of(cache)
        is_first = all(group.rank() == 0 for group in groups)
        return cls(initial, rules, is_first=is_first, is_alone=not groups)

    @property
    def is_alone(self) -> bool:
        return self._is_alone

    @property
    def is_first(self) -> bool:
        return self._is_first

    @property
    def agreed(self) -> tuple[float, ...]:
        """The standing values as of the last exchange: the same on every rank."""
        return self._agreed

    def share_values(self, values: Sequence[float]) -> tuple[float, ...]:
        """Share what this rank measures now; return what all ranks agreed on last.

        NaN stands for no value: while every rank that counts says so, the agreed value stays.
        """
        if len(values) != len(self._rules):
            raise ValueError(f"{len(values)} values under {len(self._rules)} rules")
        self._own = tuple(values)
        if self._is_alone:
            self._agreed = tuple(
                old if math.isnan(new) else float(new)
                for old, new in zip(self._agreed, values, strict=True)
            )
        return self._agreed

    def ask_ranks(self, question: Hashable, value: int) -> int | None:
        """Return the smallest value that any rank gave for a question; None until the next
        exchange.

        Ask again after a None; ``value`` counts only when the question is new, and the answer
        stays until ``forget``.
        """
        if self._is_alone:
            return value
        answer = self._answers.get(question)
        if answer is None:
            self._questions.setdefault(question, value)
        return answer

    def forget_question(self, question: Hashable) -> None:
        """Drop a question whose answer was used or is no longer wanted. Unknown ones are
        ignored."""
        self._questions.pop(question, None)
        self._answers.pop(question, None)

    def forget_all(self) -> None:
        self._questions.clear()
        self._answers.clear()

    @contextmanager
    def boarding(self) -> Iterator[None]:
        """Let the first reduction within SGLang's exchange of a step carry these values too."""
        self._is_boarding = not self._is_alone
        try:
            yield
        finally:
            self._is_boarding = False

    def ride(
        self, exchange: Callable[[torch.Tensor, Any], None], data: torch.Tensor, operator: Any
    ) -> None:
        """Call ``exchange``, which reduces ``data`` over all ranks. Within ``boarding`` the first
        ``data`` ([values] int64) carries this rank's values too."""
        if not self._is_boarding:
            exchange(data, operator)
            return
        self._is_boarding = False
        # Minima of other integers than these could not be added to.
        assert data.dtype == torch.int64 and operator == torch.distributed.ReduceOp.MIN
        together = torch.cat([data, self.values_to_send()])
        exchange(together, operator)
        data.copy_(together[: len(data)])
        self.accept_values(together[len(data) :])
        assert_same("agreed on %s", self._agreed)

    def values_to_send(self) -> torch.Tensor:
        """Return what this rank sends: [values + questions] int64, to be reduced by minimum."""
        sent = [
            self._encode(value, rule) for value, rule in zip(self._own, self._rules, strict=True)
        ]
        return torch.tensor([*sent, *self._questions.values()], dtype=torch.int64)

    def accept_values(self, reduced: torch.Tensor) -> None:
        """Take what all ranks sent, reduced: [values + questions] int64."""
        received = reduced.tolist()
        num_values = len(self._rules)
        self._agreed = tuple(
            old if number == SILENT else self._decode(number, rule)
            for old, number, rule in zip(
                self._agreed, received[:num_values], self._rules, strict=True
            )
        )
        self._answers.update(zip(self._questions, received[num_values:], strict=True))
        self._questions.clear()
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def _encode(self, value: float, rule: Rule) -> int:
        if math.isnan(value) or (rule is Rule.FIRST and not self._is_first):
            return SILENT
        return -_ordered(value) if rule is Rule.LARGEST else _ordered(value)

    def _decode(self, number: int, rule: Rule) -> float:
        return _unordered(-number if rule is Rule.LARGEST else number)


def _ordered(value: float) -> int:
    """Return an integer that is smaller for a smaller float."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits) if bits >= 0 else -(int(bits) & SILENT)


def _unordered(number: int) -> float:
    bits = number if number >= 0 else -number - SILENT - 1
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(value)


def groups_of(cache: UnifiedRadixCache) -> list[torch.distributed.ProcessGroup]:
    """Return the groups of the ranks that serve the same requests from equal trees, those that
    SGLang's exchange reduces over; none for a lone rank. With DP attention the group of tensor
    parallelism leaves out those of context parallelism."""
    attention = (cache.attn_cp_group, cache.attn_tp_group)
    groups = [group for group in attention if group is not None and group.size() > 1]
    return [cache.tp_group] if not groups and cache.tp_world_size > 1 else groups


def least_on_every_rank(cache: UnifiedRadixCache, values: list[int]) -> list[int]:
    """Return the smallest of each value over all ranks that serve the same requests."""
    reduced = torch.tensor(values, dtype=torch.int64)
    cache._all_reduce_attn_groups(reduced, torch.distributed.ReduceOp.MIN)  # noqa: SLF001
    return [int(value) for value in reduced]


def first_ranks(cache: UnifiedRadixCache, data: bytes) -> bytes:
    """Return what the first of the ranks that serve the same requests passed here."""
    groups = groups_of(cache)
    if not groups:
        return data
    is_first = all(group.rank() == 0 for group in groups)
    (length,) = least_on_every_rank(cache, [len(data) if is_first else SILENT])
    if not length:
        return b""
    sent = np.full(-(-length // _BYTES_SENT), SILENT)
    if is_first:
        parts = np.zeros((len(sent), 8), np.uint8)  # whose top bytes stay 0: a number is positive
        padded = np.frombuffer(data.ljust(len(sent) * _BYTES_SENT, b"\0"), np.uint8)
        parts[:, :_BYTES_SENT] = padded.reshape(-1, _BYTES_SENT)
        sent = parts.view(np.int64)[:, 0]
    received = torch.from_numpy(sent.copy())
    cache._all_reduce_attn_groups(received, torch.distributed.ReduceOp.MIN)  # noqa: SLF001
    back = received.numpy().view(np.uint8).reshape(-1, 8)[:, :_BYTES_SENT]
    return back.tobytes()[:length]
