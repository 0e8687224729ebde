"""The flags of the object tier as a configuration, and that as settings of its engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.codecs import CODEC_NAMES, NO_CODEC
from sglang_tiered.config import (
    DEFAULT_OBJECT_BYTES,
    ObjectConfig,
    parse_bytes,
    parse_duration,
)
from sglang_tiered.errors import ConfigError
from sglang_tiered.extras import require
from sglang_tiered.integration.launch.flags import OBJECT_FLAGS
from sglang_tiered.integration.storage.tiers import rank_settings

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["resolve_object"]


def resolve_object(explicit: Mapping[str, Any]) -> ObjectConfig | None:
    """Judge the given flags; None without a URL. Raises ``ConfigError``; touches nothing."""
    given = {
        flag: value
        for flag in OBJECT_FLAGS
        if (value := explicit.get(flag.lstrip("-").replace("-", "_"))) is not None
    }
    if "--tier-object-url" not in given:
        for flag, value in given.items():
            raise ConfigError(f"{flag} {value} needs --tier-object-url; pass it, or drop this.")
        return None

    cap, writes = given.get("--tier-object-bytes"), given.get("--tier-object-writes-per-day")
    require("--tier-object-url", "obstore")
    ttl = given.get("--tier-object-ttl")
    config = ObjectConfig(
        url=_url(given["--tier-object-url"]),
        capacity_bytes=DEFAULT_OBJECT_BYTES
        if cap is None
        else parse_bytes("--tier-object-bytes", cap, otherwise="drop it for 1TiB"),
        ttl_s=None if ttl is None else parse_duration("--tier-object-ttl", ttl),
        writes_per_day=None
        if writes is None
        else parse_bytes("--tier-object-writes-per-day", writes, otherwise="drop it for no limit"),
        requests_per_day=_count(given.get("--tier-object-requests-per-day")),
        codec=_codec(given.get("--tier-object-codec", NO_CODEC)),
    )
    rank_settings(config, num_ranks=1)
    return config


def _url(text: str) -> str:
    """A path stands for the URL of that directory."""
    if "://" not in text and text.startswith(("/", "~")):
        return Path(text).expanduser().absolute().as_uri()
    return text


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(
            f"--tier-object-requests-per-day {text} is not a number above zero; drop it for no "
            "limit."
        )
    return int(text)


def _codec(name: str) -> str:
    if name not in CODEC_NAMES:
        names = ", ".join(CODEC_NAMES)
        raise ConfigError(f"--tier-object-codec {name} is unknown; choose one of {names}.")
    if name != NO_CODEC:  # the lossy ones compress too
        require(f"--tier-object-codec {name}", "zstandard")
    return name
