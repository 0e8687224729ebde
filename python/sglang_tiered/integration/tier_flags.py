"""Our flags: names, values and help, and how they join SGLang's parser."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["TIER_FLAGS", "add_tier_arguments", "join_tier_values"]

TIER_FLAGS = {
    "--tier-mode": (
        "{off,host,nvme}",
        "Tiers below device memory: none (stock SGLang), host memory, or host memory and NVMe. "
        "Default: nvme.",
    ),
    "--tier-dir": (
        "DIR",
        "Directory of the NVMe tier, on a local disk; created if missing, used by one server at a "
        "time. Default: $XDG_CACHE_HOME/sglang-tiered/kv.",
    ),
    "--tier-host-bytes": (
        "SIZE",
        "Host memory tier of all ranks together, e.g. 64GiB. Default: a quarter of the memory "
        "that is free, at most 64GiB.",
    ),
    "--tier-nvme-bytes": (
        "SIZE",
        "Cap of the NVMe tier of all ranks together, in physical bytes. Default: a quarter of the "
        "disk space that is free, at most 256GiB.",
    ),
    "--tier-nvme-region-bytes": (
        "SIZE",
        "Size of one region file, the unit of eviction. Default: 256MiB, less for caps below 2GiB.",
    ),
    "--tier-nvme-writes-per-day": (
        "SIZE",
        "What all ranks together may write to the NVMe device in any 24 hours, e.g. 500GiB; below "
        "it, prefixes seen twice and long ones go first. Default: no limit.",
    ),
    "--tier-load": (
        "{measured,always}",
        "What to load of what NVMe holds: what is measured to be cheaper than computing, or "
        "everything. Default: measured.",
    ),
    "--tier-warm-host": (
        "{on,off}",
        "After a restart, load the prefixes that came back last into host memory, in the "
        "background. Their tokens are kept beside the pages. Default: off.",
    ),
    "--tier-tenant-share": (
        "PERCENT",
        "The most of the NVMe tier that one tenant may take, e.g. 25%%. Default: no limit.",
    ),
    "--tier-flush": (
        "{memory,all}",
        "What SGLang's /flush_cache empties: device and host memory, or NVMe too. Default: memory.",
    ),
}


def add_tier_arguments(parser: argparse.ArgumentParser) -> None:
    """Our flags, as a section of ``--help``. Values stay text; ``resolve`` judges them."""
    group = parser.add_argument_group(
        "tiering", "The tiers below device memory (sglang-tiered). Sizes: 64GiB, 64GB or bytes."
    )
    for flag, (metavar, text) in TIER_FLAGS.items():
        group.add_argument(flag, metavar=metavar, help=text, default=None)


def join_tier_values(arguments: Sequence[str]) -> list[str]:
    """``--tier-x value`` as ``--tier-x=value``, so that argparse does not take ``-1GiB`` for a
    flag and answers with our sentence instead of its usage."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in TIER_FLAGS and not argument.startswith("--"):
            joined[-1] += "=" + argument
        else:
            joined.append(argument)
    return joined
