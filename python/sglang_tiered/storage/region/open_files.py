"""How many region files a process may hold open: each one stays open while it is in the log.

The soft limit of a process is raised as far as a store needs and the hard limit lets it, so a store
that would outgrow the hard limit is refused while nothing depends on it, not when sockets fail.
"""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

from sglang_tiered.errors import StoreError
from sglang_tiered.storage.region.format import parse_region_name

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["allow_regions", "max_regions"]

_RESERVED = 512  # of a process, for sockets, libraries and the other files of its tiers


def max_regions() -> int:
    """How many of a store the hard limit has room for, in a process that holds nothing else."""
    return _limits()[1] - _RESERVED


def allow_regions(directory: Path, capacity_bytes: int, region_bytes: int) -> None:
    """Raise the soft limit to what a store needs that holds what is there and fills up to its cap.
    Raises ``StoreError`` where the hard limit is lower, and ``OSError``."""
    held = [
        entry.stat(follow_symlinks=False).st_size
        for entry in os.scandir(directory)
        if parse_region_name(entry.name) is not None
    ]
    num_regions = len(held) + max(capacity_bytes - sum(held), 0) // region_bytes
    soft, hard = _limits()
    needed = num_regions + _num_open() + _RESERVED
    if needed <= soft:
        return
    if needed > hard:
        raise StoreError(
            f"{directory} may come to hold {num_regions} region files, all of them open, but the "
            f"hard limit of open files (ulimit -Hn) is {hard}, {_RESERVED} of them for other use; "
            "raise it, or pass a larger --tier-nvme-region-bytes, a smaller --tier-nvme-bytes or "
            "another --tier-dir"
        )
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, limits[1]))


def _limits() -> tuple[int, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = (1 << 31) - 1
    return (most if soft == unlimited else soft, most if hard == unlimited else hard)


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0  # it was only to be exact
