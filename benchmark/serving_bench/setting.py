"""Sizes of a run: the model, the tiers, and how much is asked of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

__all__ = ["FULL", "PAGE_SIZE", "QUICK", "TINY", "Geometry", "Setting", "context_lengths"]

PAGE_SIZE = 64
# SGLang adds one page of padding to every host pool.
PADDING_PAGES = 1


@dataclass(frozen=True)
class Geometry:
    """What one server of a comparison holds below the model; equal for all of them."""

    device_tokens: int
    host_ratio: int  # host tokens per device token
    nvme_bytes: int = 0

    @property
    def host_tokens(self) -> int:
        return self.device_tokens * self.host_ratio + PADDING_PAGES * PAGE_SIZE

    @property
    def memory_tokens(self) -> int:
        """Device and host together: the capacity that a working set is compared with."""
        return self.device_tokens + self.host_tokens


@dataclass(frozen=True)
class Setting:
    """One way to run every scenario."""

    name: str
    shape: str  # of scripts/make_demo_model.py
    main: Geometry
    disk: Geometry  # of the disk scenario: its host tier holds whatever was just loaded
    systems: tuple[str, ...]  # unless asked for otherwise
    contexts: tuple[int, int]  # tokens of a conversation of `returning` when it first appears
    disk_contexts: tuple[int, int]  # of `disk_added`
    prompt_tokens: int  # of a prompt or conversation of the other scenarios
    num_new: int  # tokens a returning turn adds; users of ShareGPT send 94.5 on average
    num_output: int
    rounds: int
    per_round: int  # returning turns in a round
    working_set: float  # conversations' tokens over device and host tokens
    nvme_over_working_set: float
    trace_requests: int

    def with_nvme(self, kv_bytes_per_token: int) -> Setting:
        """The same with the byte cap of the NVMe tier filled in, for a model's KV size."""
        tokens = self.main.memory_tokens * self.working_set * self.nvme_over_working_set
        cap = max(int(tokens * kv_bytes_per_token), 64 << 20)
        return replace(
            self,
            main=replace(self.main, nvme_bytes=cap),
            disk=replace(self.disk, nvme_bytes=cap),
        )


FULL = Setting(
    name="full",
    shape="24m",
    main=Geometry(device_tokens=6144, host_ratio=2),
    disk=Geometry(device_tokens=12288, host_ratio=3),
    systems=("stock", "hicache-host", "hicache-file", "tiered"),
    contexts=(2048, 3072),
    disk_contexts=(1024, 2048),
    prompt_tokens=1024,
    num_new=96,
    num_output=4,
    rounds=5,
    per_round=4,
    working_set=4.0,
    nvme_over_working_set=1.5,
    trace_requests=64,
)

QUICK = replace(
    FULL,
    name="quick",
    main=Geometry(device_tokens=2560, host_ratio=2),
    disk=Geometry(device_tokens=8192, host_ratio=3),
    systems=("stock", "hicache-file", "tiered"),
    contexts=(768, 1280),
    disk_contexts=(768, 1024),
    prompt_tokens=768,
    rounds=3,
    trace_requests=32,
)

# Its figures mean nothing; it shows within a minute or two that everything runs.
TINY = replace(
    QUICK,
    name="tiny",
    shape="8m",
    main=Geometry(device_tokens=1024, host_ratio=2),
    disk=Geometry(device_tokens=2048, host_ratio=3),
    contexts=(256, 400),
    disk_contexts=(256, 400),
    prompt_tokens=320,
    num_new=32,
    rounds=2,
    per_round=3,
    working_set=2.0,
    trace_requests=8,
)


def context_lengths(
    source: random.Random, contexts: tuple[int, int], total_tokens: float
) -> list[int]:
    """Conversation lengths, evenly spread, until together they reach ``total_tokens``."""
    lengths: list[int] = []
    while sum(lengths) < total_tokens:
        lengths.append(source.randint(*contexts))
    return lengths
