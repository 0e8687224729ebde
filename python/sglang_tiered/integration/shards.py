"""Names of the shards in a tier directory: one per rank, since ranks hold different bytes."""

from __future__ import annotations

import re

__all__ = ["has_geometry", "num_replicas", "shard_name"]

_NAME = re.compile(r"tp(\d+)of(\d+)-pp(\d+)of(\d+)-dp(\d+)-(\d+)")


def shard_name(
    *, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int, dp_rank: int, replica: int
) -> str:
    """The shard of one rank. ``replica`` tells apart schedulers with the same ranks."""
    return f"tp{tp_rank}of{tp_size}-pp{pp_rank}of{pp_size}-dp{dp_rank}-{replica}"


def num_replicas(num_ranks: int, *, tp_size: int, pp_size: int, dp_size: int) -> int:
    """Of ``num_ranks`` schedulers on a machine, how many have the same ranks; ``dp_size`` is that
    of DP attention."""
    return max(1, num_ranks // (tp_size * pp_size * dp_size))


def has_geometry(name: str, *, num_ranks: int, tp_size: int, pp_size: int, dp_size: int) -> bool:
    """Whether a server with these sizes opens that shard; false for names not made here."""
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    _, tp, _, pp, dp_rank, replica = map(int, match.groups())
    replicas = num_replicas(num_ranks, tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)
    return (tp, pp) == (tp_size, pp_size) and dp_rank < dp_size and replica < replicas
