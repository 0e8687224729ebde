"""Names of the shards in a tier directory: one per rank where ranks hold different bytes, and that
of a server with one rank where they hold the same (``shared_pages``). And the sizes behind them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tiered.config import TieredConfig


_GIVEN = ("tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "nnodes")
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


class Sizes(NamedTuple):
    """What ``TieredConfig`` says of the ranks; ``num_replicas`` have requests of their own."""

    num_ranks: int
    tp_size: int
    pp_size: int
    dp_size: int
    num_replicas: int

    def put_into(self, config: TieredConfig) -> TieredConfig:
        """Return ``config`` with these sizes. Raises ``ConfigError`` where its caps are too small
        for them."""
        sizes = self._asdict()
        log, num_replicas = config.request_log, sizes.pop("num_replicas")
        if log is not None:
            log = msgspec.structs.replace(log, num_replicas=num_replicas)
        return msgspec.structs.replace(config, **sizes, request_log=log)


def sizes_of(given: Mapping[str, Any]) -> Sizes:
    """Return the sizes of a command line, by its explicit arguments."""
    tp, pp, dp, attn_dp, attn_cp, num_machines = (given.get(name) or 1 for name in _GIVEN)
    if given.get("enable_dp_attention") and attn_dp == 1:  # SGLang's old spelling
        attn_dp, dp = dp, 1
    return Sizes(
        num_ranks=max(1, tp * pp * dp // num_machines),
        # With DP attention, the ranks of one group that hold the same tokens.
        tp_size=tp if attn_dp == 1 else max(1, tp // (attn_dp * attn_cp)),
        pp_size=pp,
        dp_size=attn_dp,
        num_replicas=dp * attn_dp,
    )


def of_settings(settings: Any) -> Sizes:
    """Return the sizes of a server by SGLang's settings, resolved: a model may change them."""
    return sizes_of({name: getattr(settings, name) for name in _GIVEN})
