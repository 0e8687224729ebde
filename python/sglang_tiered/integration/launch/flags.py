"""Our flags: names, values and help, and how they join SGLang's parser."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "OBJECT_FLAGS",
    "PEER_FLAGS",
    "TIER_FLAGS",
    "TRANSFER_FLAGS",
    "add_tier_arguments",
    "join_tier_values",
    "without_our_flags",
]

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
        "Host memory tier of all ranks together, e.g. 64GiB. Default: twice the device pool, at "
        "most four fifths of the memory that can be had (SGLang's --hicache-host-memory-fraction).",
    ),
    "--tier-nvme-bytes": (
        "SIZE",
        "Cap of the NVMe tier of all ranks together, in physical bytes. Default: a quarter of the "
        "disk space that is free, at most 256GiB.",
    ),
    "--tier-nvme-region-bytes": (
        "SIZE",
        "Size of one region file, the unit of eviction. Default: 256MiB, less for caps below 2GiB, "
        "more for caps above 1TiB of a rank or where few files may be open.",
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
    "--tier-trust-mm-hashes": (
        "{on,off}",
        "Take mm_hashes of a request for what its images hash to. Only where every client is "
        "trusted: one could store its image's pages under another's name. Default: off.",
    ),
}

OBJECT_FLAGS = {
    "--tier-object-url": (
        "URL",
        "Object store below NVMe that servers share: s3://bucket/prefix, gs://, az://, or the path "
        "of a shared directory. Credentials come from the environment. Default: none.",
    ),
    "--tier-object-bytes": (
        "SIZE",
        "Cap of what all servers with the same model and settings have there, kept by their "
        "collectors; the oldest goes first. Default: 1TiB.",
    ),
    "--tier-object-ttl": (
        "TIME",
        "Age at which objects stop being found and are deleted, e.g. 7d. Default: no limit.",
    ),
    "--tier-object-writes-per-day": (
        "SIZE",
        "What this server may write there in any 24 hours, e.g. 200GiB. Default: no limit.",
    ),
    "--tier-object-requests-per-day": (
        "N",
        "Requests that write (put, delete) it may make in any 24 hours. Default: no limit.",
    ),
    "--tier-object-codec": (
        "NAME",
        "How pages are encoded there: none, zstd (exact), or fp8 and int8, which change the KV "
        "that comes back. Default: none.",
    ),
}

PEER_FLAGS = {
    "--tier-index": (
        "URL",
        "Redis in which servers tell each other which pages they hold, so that each can fetch them "
        "from the others: redis://host:6379, rediss:// (TLS) or unix://. With a password better in "
        "SGLANG_TIERED_INDEX_URL. Default: that variable, or none.",
    ),
    "--tier-peer-host": (
        "HOST",
        "Where this server gives pages to others. Default: --host.",
    ),
    "--tier-peer-port": (
        "PORT",
        "Its port; each further rank takes the next one. Default: any free one.",
    ),
    "--tier-peer-keys": (
        "DIR",
        "Directory with peer.key, peer.key_secret and the *.key of those to serve (python -m "
        "sglang_tiered keygen). With it pages travel encrypted. Default: none.",
    ),
}

TRANSFER_FLAGS = {
    "--transfer-keys": (
        "DIR",
        "Directory with the keys of this role and its peers (python -m sglang_tiered keygen). "
        "With it peers know each other and the control channel is encrypted. "
        "Default: none.",
    ),
    "--transfer-encrypt": (
        "{control,all}",
        "What the keys encrypt: the control channel, with headers of KV authenticated, or KV too, "
        "at about half a gigabyte per second. Default: control.",
    ),
    "--transfer-allow": (
        "ADDRESSES",
        "Prefill instances on other machines from which decode takes KV: addresses or networks "
        "with commas, e.g. 192.0.2.0/24. Default: all with --transfer-keys, none without.",
    ),
    "--transfer-same-host": (
        "{auto,off}",
        "Whether decode reads KV out of the memory of a prefill instance on its own machine, where "
        "the system lets it. Default: auto.",
    ),
    "--transfer-window-bytes": (
        "SIZE",
        "KV under way to one decode rank at most, e.g. 64MiB. Default: 64MiB.",
    ),
    "--transfer-connections": (
        "N",
        "TCP connections of KV per pair of ranks; 2 to 4 for links of 25 Gbit/s and more. "
        "Default: 1.",
    ),
    "--transfer-codec": (
        "{none,int8,zstd}",
        "How KV travels, the same on both sides: as it is; in a byte per element, which changes it "
        "a little; or compressed without loss. For links below 7 and 6 Gbit/s. Default: none.",
    ),
    "--transfer-peer-timeout": (
        "SECONDS",
        "Silence after which a peer counts as dead. One that ends is noticed at once. Default: 4.",
    ),
}

_OURS = {**TIER_FLAGS, **OBJECT_FLAGS, **PEER_FLAGS, **TRANSFER_FLAGS}


def add_tier_arguments(parser: argparse.ArgumentParser) -> None:
    """Our flags, as a section of ``--help``. Values stay text; ``resolve`` judges them."""
    tiering = parser.add_argument_group(
        "tiering", "The tiers below device memory (sglang-tiered). Sizes: 64GiB, 64GB or bytes."
    )
    transfer = parser.add_argument_group(
        "KV transfer", "Prefill and decode on different instances, over ZeroMQ (sglang-tiered)."
    )
    for group, flags in (
        (tiering, TIER_FLAGS),
        (tiering, OBJECT_FLAGS),
        (tiering, PEER_FLAGS),
        (transfer, TRANSFER_FLAGS),
    ):
        for flag, (metavar, text) in flags.items():
            group.add_argument(flag, metavar=metavar, help=text, default=None)


def join_tier_values(arguments: Sequence[str]) -> list[str]:
    """``--tier-x value`` as ``--tier-x=value``, so that argparse does not take ``-1GiB`` for a
    flag and answers with our sentence instead of its usage."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in _OURS and not argument.startswith("--"):
            joined[-1] += "=" + argument
        else:
            joined.append(argument)
    return joined


def without_our_flags(arguments: Sequence[str]) -> list[str]:
    """What SGLang knows of a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in _OURS:
        parser.add_argument(flag)
    return parser.parse_known_args(list(arguments))[1]
