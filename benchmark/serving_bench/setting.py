"""Sizes of a run: the model, the tiers, and how much is asked of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random


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
class Crowd:
    """Sizes of `users`: the first number of users fits on the device, the last has up to ten times
    what host memory holds."""

    geometry: Geometry
    contexts: tuple[int, int]  # tokens of a conversation, from its opening to its longest
    users: tuple[int, ...]
    slices: int  # parts of each point in which systems take turns
    min_samples: int  # of a point, all slices together


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
    throughput_rounds: int  # of batches, which differ more from each other than means of TTFT
    per_round: int  # returning turns in a round
    working_set: float  # conversations' tokens over device and host tokens
    nvme_over_working_set: float
    trace_requests: int
    crowd: Crowd
    regret_ratios: tuple[float, ...]  # R: load over prefill
    regret_window_s: float  # what a policy has to notice a change of speed

    def with_nvme(self, kv_bytes_per_token: int) -> Setting:
        """The same with the byte cap of the NVMe tier filled in, for a model's KV size."""
        tokens = self.main.memory_tokens * self.working_set * self.nvme_over_working_set
        cap = max(int(tokens * kv_bytes_per_token), 64 << 20)
        return replace(
            self,
            main=replace(self.main, nvme_bytes=cap),
            disk=replace(self.disk, nvme_bytes=cap),
            crowd=replace(self.crowd, geometry=self._crowd_geometry(kv_bytes_per_token)),
        )

    def _crowd_geometry(self, kv_bytes_per_token: int) -> Geometry:
        """A store that holds the users of all points, their dead branches included."""
        crowd = self.crowd
        tokens = 0.0
        for number in crowd.users:
            turns = max(crowd.min_samples, number * crowd.slices)
            tokens += number * crowd.contexts[1] + turns * (self.num_new + PAGE_SIZE)
        cap = max(int(tokens * 1.5 * kv_bytes_per_token), 64 << 20)
        return replace(crowd.geometry, nvme_bytes=cap)


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
    throughput_rounds=9,
    per_round=4,
    working_set=4.0,
    nvme_over_working_set=1.5,
    trace_requests=64,
    crowd=Crowd(
        geometry=Geometry(device_tokens=8192, host_ratio=1),
        contexts=(768, 1472),
        users=(5, 10, 25, 50),
        slices=3,
        min_samples=200,
    ),
    regret_ratios=(0.25, 0.57, 0.8, 1.0, 1.25, 2.0),
    regret_window_s=10.0,
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
    crowd=Crowd(
        geometry=Geometry(device_tokens=4096, host_ratio=1),
        contexts=(320, 704),
        users=(5, 10, 25, 50),
        slices=2,
        min_samples=60,
    ),
    regret_ratios=(0.57, 1.25),
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
    throughput_rounds=2,
    per_round=3,
    working_set=2.0,
    trace_requests=8,
    crowd=Crowd(
        geometry=Geometry(device_tokens=1536, host_ratio=1),
        contexts=(128, 256),
        users=(5, 20),
        slices=2,
        min_samples=20,
    ),
    regret_ratios=(0.57,),
    regret_window_s=2.0,
)


def context_lengths(
    source: random.Random, contexts: tuple[int, int], total_tokens: float
) -> list[int]:
    """Conversation lengths, evenly spread, until together they reach ``total_tokens``."""
    lengths: list[int] = []
    while sum(lengths) < total_tokens:
        lengths.append(source.randint(*contexts))
    return lengths
