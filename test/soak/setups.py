"""What a server life of the live soak is drawn from: topology, flags, what its disk can take."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TOPOLOGIES", "Setup", "draw"]

TOPOLOGIES = ("one", "ranks", "pair", "peers")
"""One server, one of two ranks, a prefill and a decode server, three servers that share pages with
each other and a bucket over HTTP."""
SMALL_REGIONS = ("--config", str(Path(__file__).parents[1] / "kit" / "small_regions.yaml"))
TOKEN_BYTES = 3 * 2 * 2 * 64 * 4  # of the demo model, over all ranks
MiB = 1 << 20


@dataclass(frozen=True)
class Setup:
    """How the servers of one life are started."""

    topology: str
    page: int
    device_tokens: int
    host_bytes: int
    nvme_bytes: int
    load: str
    has_bucket: bool
    mode: str  # of the asynchronous platform
    horizon_s: float  # the longest delay of its copies and forwards

    def flags(self, bucket: str) -> list[str]:
        """Of every server of the life, but for the directory of its tier and its peers."""
        flags = [
            *("--page-size", str(self.page), "--max-total-tokens", str(self.device_tokens)),
            *("--chunked-prefill-size", "512", "--enable-metrics"),
            *("--tier-host-bytes", str(self.host_bytes)),
            *("--tier-nvme-bytes", str(self.nvme_bytes), *SMALL_REGIONS),
            *("--tier-load", self.load),
        ]
        if self.has_bucket:
            flags += ["--tier-object-url", bucket]
        if self.topology == "ranks":
            flags += ["--tp", "2"]
        return flags

    def told(self) -> str:
        return (
            f"{self.topology}, pages of {self.page}, {self.device_tokens} tokens on the device, "
            f"{self.host_bytes / MiB:.1f} MiB host, {self.nvme_bytes / MiB:.0f} MiB NVMe, "
            f"loads {self.load}{', bucket' if self.has_bucket else ''}"
            f", platform {self.mode} up to {self.horizon_s} s"
        )


def draw(source: random.Random, topology: str) -> Setup:
    page = source.choice([16, 64, 64, 256])
    device_tokens = 8192 if page > 64 or topology == "pair" else 4096
    below_device = 0.6 * device_tokens * TOKEN_BYTES
    return Setup(
        topology,
        page,
        device_tokens,
        int(source.choice([36 * MiB, 36 * MiB, below_device])),
        source.choice([64, 1024]) * MiB,
        source.choice(["always", "always", "measured"]),
        source.random() < 0.3 or topology == "peers",
        source.choice(["random", "random", "late", "late-forward"]),
        source.choice([0.01, 0.03, 0.15]),
    )
