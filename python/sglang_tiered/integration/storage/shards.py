"""Names of the shards in a tier directory: one per rank where ranks hold different bytes, and that
of a server with one rank where they hold the same (``shared_pages``)."""

from __future__ import annotations

import re

__all__ = ["has_geometry", "is_of_other_sharing", "num_replicas", "shard_name"]

_NAME = re.compile(r"tp(\d+)of(\d+)-pp(\d+)of(\d+)-dp(\d+)-(\d+)")


def shard_name(
    *, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int, dp_rank: int, replica: int
) -> str:
    """Return the shard of one rank. ``replica`` tells apart schedulers with the same ranks."""
    return f"tp{tp_rank}of{tp_size}-pp{pp_rank}of{pp_size}-dp{dp_rank}-{replica}"


def num_replicas(num_ranks: int, *, tp_size: int, pp_size: int, dp_size: int) -> int:
    """Return how many of ``num_ranks`` schedulers on a machine have the same ranks; ``dp_size`` is
    that of DP attention."""
    return max(1, num_ranks // (tp_size * pp_size * dp_size))


def has_geometry(name: str, *, num_ranks: int, tp_size: int, pp_size: int, dp_size: int) -> bool:
    """Whether a server with these sizes may open that shard, whether or not its ranks share pages;
    False for names of another form."""
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    _, tp, _, pp, dp_rank, replica = map(int, match.groups())
    replicas = num_replicas(num_ranks, tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)
    return tp in (1, tp_size) and pp == pp_size and dp_rank < dp_size and replica < replicas


def is_of_other_sharing(name: str, *, opened: str, tp_size: int) -> bool:
    """Whether a shard belongs to the other way of sharing. A server with this many ranks would open
    it instead of ``opened`` if its ranks shared pages where these do not, or the reverse."""
    match, own = _NAME.fullmatch(name), _NAME.fullmatch(opened)
    if match is None or own is None:
        return False
    other_size = tp_size if own[2] == "1" else 1
    return int(match[2]) == other_size != int(own[2]) and match.groups()[2:] == own.groups()[2:]
