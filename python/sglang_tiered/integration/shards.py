"""Names of the shards in a tier directory: one per rank, since ranks hold different bytes."""

from __future__ import annotations

import re

__all__ = ["has_geometry", "shard_name"]

_NAME = re.compile(r"tp(\d+)of(\d+)-pp(\d+)of(\d+)-dp(\d+)-(\d+)")


def shard_name(
    *, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int, dp_rank: int, replica: int
) -> str:
    """The shard of one rank. ``replica`` tells apart schedulers with the same ranks."""
    return f"tp{tp_rank}of{tp_size}-pp{pp_rank}of{pp_size}-dp{dp_rank}-{replica}"


def has_geometry(name: str, *, tp_size: int, pp_size: int) -> bool:
    """Whether a shard belongs to a server with these sizes; false for names not made here."""
    match = _NAME.fullmatch(name)
    return match is not None and (int(match[2]), int(match[4])) == (tp_size, pp_size)
