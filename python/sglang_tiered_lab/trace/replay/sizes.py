"""Sizes of tiers, as people give them: bytes, tokens, or a share of what the trace asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.config import default_region_bytes
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import parse_bytes
from sglang_tiered.storage.region.format import MIN_REGION_BYTES, max_page_bytes, min_region_bytes

if TYPE_CHECKING:
    from sglang_tiered_lab.trace.replay.timing import Hardware


_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_TOKENS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMG]?)tok\s*")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, kw_only=True)
class TierSizes:
    """Gives the sizes of one server's tiers. ``region_bytes`` is for pages of the size a server
    stores."""

    device_tokens: int
    host_tokens: int
    nvme_tokens: int
    nvme_bytes: int
    region_bytes: int
    writes_per_day: int | None = None
    label: str = ""


def parse_size(flag: str, text: str, *, bytes_per_token: int, unique_tokens: int | None) -> int:
    """Tokens: of ``64GiB``, ``15Mtok``, ``30%`` of ``unique_tokens``, or ``0``. ``None`` where the
    trace has not been read yet: a share is then only checked, and is 0."""
    if text.strip() == "0":
        return 0
    if match := _SHARE.fullmatch(text):
        share = float(match[1]) / 100
        if share <= 0:
            raise ConfigError(f"{flag} {text} is nothing; write 0 to go without this tier.")
        return 0 if unique_tokens is None else max(1, int(unique_tokens * share))
    if match := _TOKENS.fullmatch(text):
        tokens = int(float(match[1]) * _FACTORS[match[2]])
    elif text.rstrip().endswith(("%", "tok")):
        raise ConfigError(
            f"{flag} {text!r} is not a size; write bytes (64GiB), tokens (15Mtok, 800ktok), a "
            "share of the trace's unique tokens (30%), or 0 to go without this tier."
        )
    else:
        otherwise = "write 0 to go without this tier"
        tokens = parse_bytes(flag, text, otherwise=otherwise) // bytes_per_token
    if tokens <= 0:
        raise ConfigError(
            f"{flag} {text} holds no token of {bytes_per_token} bytes; raise it, or write 0 to go "
            "without this tier."
        )
    return tokens


def region_bytes_for(
    nvme_bytes: int, hardware: Hardware, *, page_tokens: int, given: int | None
) -> int:
    """Return the region size a server would take, checked against what must fit. 0 without the
    tier."""
    if not nvme_bytes:
        return 0
    page_bytes = page_tokens * hardware.kv_bytes_per_token
    fitting = max(default_region_bytes(nvme_bytes), min_region_bytes(page_bytes))
    region_bytes = fitting if given is None else given
    if region_bytes < MIN_REGION_BYTES or max_page_bytes(region_bytes) < page_bytes:
        raise ConfigError(
            f"--region-bytes {given} holds no page of {page_bytes} bytes; raise it to at least "
            "twice that."
        )
    if nvme_bytes < 2 * region_bytes:
        raise ConfigError(
            f"--nvme is {nvme_bytes} bytes, which is less than two regions of {region_bytes}; "
            "raise it, lower --region-bytes, or write 0 to go without this tier."
        )
    return region_bytes
