"""``CostBoard``: memory in which schedulers leave their records for the HTTP process.

Anonymous shared memory of the launcher, which its children open through ``/proc``: nothing is left
behind, however the server ends, and neither side ever waits for the other. Every replica has two
places and writes into them in turn, so the record before is whole while the next one is written.
A record is sealed with a checksum, so one that is read while it is written is not taken for one.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import struct
import time
from typing import TYPE_CHECKING, Self

import msgspec

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.policy.server_costs import RankCosts  # noqa: TC001 - msgspec resolves it

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping


ENVIRONMENT_VARIABLE = "SGLANG_TIERED_COSTS"
"""Where the children of a launcher find its board."""

PLACE_BYTES = 4096
"""A record takes about 1 kB."""

_NAME = "sglang-tiered-costs"
_LENGTH = struct.Struct("<I")

logger = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A record with its number and the time of the snapshot by the machine's monotonic clock."""

    number: int
    clock_s: float
    costs: RankCosts


class CostBoard:
    """Of ``num_ranks`` data-parallel replicas. One process writes the records of a rank, any number
    of processes of the same user reads them. Owned by the launcher; closing it there leaves what
    others have opened."""

    def __init__(self, descriptor: int, num_ranks: int, boot: str) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _size(num_ranks))
        self.num_ranks = self.num_local_ranks = num_ranks
        self.boot = boot
        self._num_written = 0

    @classmethod
    def create(cls, num_ranks: int, num_local_ranks: int | None = None) -> CostBoard:
        """Make an empty board. ``num_local_ranks`` (all) can reach it: others are on other
        machines. Raises ``OSError`` where the system has none."""
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, _size(num_ranks))
        board = cls(descriptor, num_ranks, secrets.token_hex(16))
        board.num_local_ranks = num_local_ranks or num_ranks
        return board

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> CostBoard | None:
        """Open the launcher's board; None in a process without one, as on other machines."""
        told = environment.get(ENVIRONMENT_VARIABLE)
        if not told:
            return None
        path, num_ranks, boot = told.split(":")
        try:
            # The launcher may have ended, and its number be another process's by now.
            is_board = os.readlink(path).startswith(f"/memfd:{_NAME} ")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC) if is_board else -1
        except OSError as error:
            logger.warning("costs are not published: %s cannot be opened (%s)", path, error)
            return None
        if is_board and os.fstat(descriptor).st_size == _size(int(num_ranks)):
            return cls(descriptor, int(num_ranks), boot)
        if is_board:
            os.close(descriptor)
        logger.warning("costs are not published: %s is no board of this server", path)
        return None

    def to_environment(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Tell the children of this process where to find it, as long as this process lives."""
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        environment[ENVIRONMENT_VARIABLE] = f"{path}:{self.num_ranks}:{self.boot}"

    def write(self, costs: RankCosts, clock_s: float) -> None:
        """Replace the record of ``costs.rank``, of a snapshot taken at ``clock_s`` of
        ``time.monotonic``. Raises ``ValueError`` for a record without a place."""
        self._num_written += 1
        data = seal(_Entry(self._num_written, clock_s, costs))
        if costs.rank >= self.num_ranks or len(data) > PLACE_BYTES - _LENGTH.size:
            raise ValueError(
                f"there is no place for {len(data)} bytes of rank {costs.rank}: the board has "
                f"{self.num_ranks} ranks of {PLACE_BYTES} bytes"
            )
        start = _start(costs.rank, self._num_written % 2)
        _LENGTH.pack_into(self._memory, start, len(data))
        start += _LENGTH.size
        self._memory[start : start + len(data)] = data

    def read(self, clock: Callable[[], float] = time.monotonic) -> tuple[RankCosts, ...]:
        """Return the last record of every rank that has written one, each with its age."""
        entries = []
        for rank in range(self.num_ranks):
            found = [self._entry(_start(rank, turn)) for turn in range(2)]
            whole = [entry for entry in found if entry is not None]
            entries += sorted(whole, key=lambda entry: entry.number)[-1:]
        now = clock()
        return tuple(
            msgspec.structs.replace(entry.costs, age_s=max(0.0, now - entry.clock_s))
            for entry in entries
        )

    def _entry(self, start: int) -> _Entry | None:
        (length,) = _LENGTH.unpack_from(self._memory, start)
        start += _LENGTH.size
        return unseal(self._memory[start : start + min(length, PLACE_BYTES)], _Entry)

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        if self._descriptor >= 0:
            self._memory.close()
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _size(num_ranks: int) -> int:
    return 2 * num_ranks * PLACE_BYTES


def _start(rank: int, turn: int) -> int:
    return (2 * rank + turn) * PLACE_BYTES
