"""Which prompts are asked, and where each of them lies when it is asked again.

Every prompt goes to the device and, at the same time, to host memory and NVMe; the least recently
used leave device and host memory. So the newest are on the device, those before them in host memory
only, and the first on NVMe only, once enough were asked. A prompt at the edge of a tier may lie on
either side, so none of those is asked again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from sglang_tiered.errors import ConfigError

__all__ = ["DEVICE", "FIRST", "HOST", "KILLED", "NUM_NEW", "NVME", "Plan", "Pools", "make_plan"]

FIRST, DEVICE, HOST, NVME = "first time", "device", "host", "NVMe"
KILLED = "NVMe after kill -9"

NUM_NEW = 12
"""Tokens of an answer: enough to say something, few enough to be quick."""

_MOST_PROMPT_TOKENS = 1536
"""Long enough for a load to be worth it with a model as small as the demo's."""
_LEAST_ON_DEVICE = 5
_PROMPTS_PER_ROW = 3


@dataclass(frozen=True)
class Pools:
    """What a server's tiers hold, in tokens."""

    device_tokens: int
    host_tokens: int
    page_size: int
    has_nvme: bool


@dataclass(frozen=True)
class Plan:
    """``num_prompts`` are asked in order; then ``returns``, row by row, by their numbers."""

    prompt_tokens: int
    num_prompts: int
    returns: dict[str, tuple[int, ...]]
    missing: dict[str, str]  # rows that cannot be reached, and why


def make_plan(pools: Pools, max_tokens: int | None = None) -> Plan:
    """``max_tokens`` bounds the prompts that are asked for the first time."""
    page = pools.page_size
    pages = min(_MOST_PROMPT_TOKENS, pools.device_tokens // _LEAST_ON_DEVICE) // page
    length = max(pages, 1) * page + 1  # the last token of a prompt is always computed
    held = (length + NUM_NEW) // page * page  # what stays of a prompt and its answer
    fit_device = pools.device_tokens // held
    if fit_device < 2:
        raise ConfigError(
            f"the device holds {pools.device_tokens:,} tokens, fewer than two prompts of {held:,}; "
            "the demo needs a larger --max-total-tokens"
        )
    most = sys.maxsize if max_tokens is None else max_tokens // length
    if most < 1:
        raise ConfigError(
            f"--max-tokens {max_tokens} is less than one prompt; pass {length} at least"
        )
    # By age: how many were asked after it.
    off_device = -(-pools.device_tokens // held)
    off_host = max(off_device, -(-pools.host_tokens // held)) + 1
    ages = {
        DEVICE: range(min(_PROMPTS_PER_ROW, fit_device - 1)),
        HOST: range(off_device, min(off_device + _PROMPTS_PER_ROW, pools.host_tokens // held)),
        NVME: range(off_host, off_host + (_PROMPTS_PER_ROW if pools.has_nvme else 0)),
    }
    nothing = {
        HOST: "host memory holds no more than the device",
        NVME: "this server has no NVMe tier",
    }
    reached: dict[str, list[int]] = {}
    missing: dict[str, str] = {}
    for row, wanted in ages.items():
        if not wanted:
            missing[row] = nothing[row]
        elif wanted[0] >= most:
            missing[row] = f"would take {(wanted[0] + 1) * length:,} tokens"
        else:
            reached[row] = [age for age in wanted if age < most]
    oldest = max(age for row in reached.values() for age in row)
    returns = {row: tuple(oldest - age for age in reached[row]) for row in reached}
    return Plan(length, oldest + 1, returns, missing)
