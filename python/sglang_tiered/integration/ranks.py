"""What ranks agree on about measurements that differ between them, at no collective of its own.

Ranks of tensor parallelism must decide alike, but a rank's clock, its disk and what its shard
holds are its own. SGLang reduces a small tensor of queue lengths over all ranks in every scheduler
step, idle or not (``UnifiedRadixCache._sync_hicache_ready_counts``, by minimum). These values ride
in that tensor as a few more numbers (``boarding``, ``ride``).

Used on the scheduler thread only. Every rank makes the same calls in the same order between two
exchanges, as SGLang demands of everything there, so all tensors have the same length.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.utils.rank_consensus_checker import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


SILENT = torch.iinfo(torch.int64).max

MAX_ANSWERS = 4096
"""Beyond this number unread answers are dropped, oldest first."""


class RankAgreement:
    """Holds the questions of one rank. ``is_first``: whether this is the first rank. ``is_alone``:
    there is no other rank; then nothing is exchanged and every question is answered at once.
    """

    def __init__(self, *, is_first: bool, is_alone: bool) -> None:
        self.is_first = is_first
        self.is_alone = is_alone
        self._questions: OrderedDict[Hashable, int] = OrderedDict()
        self._answers: OrderedDict[Hashable, int] = OrderedDict()
        self._is_boarding = False

    @classmethod
    def of_cache(cls, cache: UnifiedRadixCache) -> RankAgreement:
        """Create one for the ranks that SGLang's exchange reduces over."""
        groups = groups_of(cache)
        is_first = all(group.rank() == 0 for group in groups)
        return cls(is_first=is_first, is_alone=not groups)

    def ask_ranks(self, question: Hashable, value: int) -> int | None:
        """Return the smallest value that any rank gave for a question; None until the next
        exchange.

        Ask again after a None; ``value`` counts only when the question is new, and the answer
        stays until ``drop_question``.
        """
        if self.is_alone:
            return value
        answer = self._answers.get(question)
        if answer is None:
            self._questions.setdefault(question, value)
        return answer

    def drop_question(self, question: Hashable) -> None:
        """Drop a question whose answer was used or is no longer wanted. Unknown ones are
        ignored."""
        self._questions.pop(question, None)
        self._answers.pop(question, None)

    def drop_all(self) -> None:
        self._questions.clear()
        self._answers.clear()

    @contextmanager
    def boarding(self) -> Iterator[None]:
        """Let the first reduction within SGLang's exchange of a step carry these values too."""
        self._is_boarding = not self.is_alone
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
        assert_same("agreed on %s", list(self._answers.values()))

    def values_to_send(self) -> torch.Tensor:
        """Return what this rank sends: [questions] int64, to be reduced by minimum."""
        return torch.tensor([*self._questions.values()], dtype=torch.int64)

    def accept_values(self, reduced: torch.Tensor) -> None:
        """Take what all ranks sent, reduced: [questions] int64."""
        self._answers.update(zip(self._questions, reduced.tolist(), strict=True))
        self._questions.clear()
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)


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
    sent = torch.full((length,), 0xFF, dtype=torch.uint8)
    if is_first:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    cache._all_reduce_attn_groups(sent, torch.distributed.ReduceOp.MIN)  # noqa: SLF001
    return sent.numpy().tobytes()
