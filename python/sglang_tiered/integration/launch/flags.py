"""Adds the flags of ``config`` to SGLang's parser, for a command line and for a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from sglang_tiered.config import NvmeConfig, TieredConfig, TransferConfig
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import add_arguments, flags_of
from sglang_tiered.remote_config import ObjectConfig, PeerConfig
from sglang_tiered.request_log import RequestLogConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ALL_FLAGS",
    "NVME_FLAGS",
    "TIER_FLAGS",
    "add_tier_arguments",
    "as_words",
    "join_tier_values",
    "refuse_empty_settings",
    "refuse_settings",
    "without_our_flags",
]

NVME_FLAGS = flags_of(NvmeConfig, ObjectConfig, PeerConfig, RequestLogConfig)
"""Flags that mean nothing without an NVMe tier."""
TIER_FLAGS = flags_of(TieredConfig) + NVME_FLAGS
ALL_FLAGS = TIER_FLAGS + flags_of(TransferConfig)
_OURS = {flag.option: flag for flag in ALL_FLAGS}


def add_tier_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this package as sections of ``--help``. Values stay text, which ``resolve``
    checks."""
    tiering = parser.add_argument_group(
        "tiering", "The tiers below device memory (sglang-tiered). Sizes: 64GiB, 64GB or bytes."
    )
    add_arguments(tiering, TieredConfig, NvmeConfig, ObjectConfig, PeerConfig, RequestLogConfig)
    transfer = parser.add_argument_group(
        "KV transfer", "Prefill and decode on different instances, over ZeroMQ (sglang-tiered)."
    )
    add_arguments(transfer, TransferConfig)


def refuse_settings(arguments: Sequence[str]) -> None:
    """Raise ``ConfigError`` for settings on the command line."""
    for word in arguments:
        flag = _OURS.get(word.partition("=")[0])
        if flag is not None and flag.is_setting:
            raise ConfigError(
                f"{flag.option} is no flag; write {flag.name}: {flag.kind.metavar} in the YAML "
                "file of --config."
            )


def refuse_empty_settings(arguments: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a key without a value in the file of ``--config``: SGLang takes it
    for the word None."""
    (name, *_) = [*arguments[arguments.index("--config") + 1 :], ""]
    try:
        content = yaml.safe_load(Path(name).read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return  # SGLang reads it again, and says what is wrong
    for key, value in content.items() if isinstance(content, dict) else ():
        if value is None or (isinstance(value, list) and None in value):
            raise ConfigError(
                f"{key} has no value in {name} of --config; write one, or drop the line."
            )


def as_words(merged: Sequence[str]) -> list[str]:
    """Restore on and off in the arguments of a YAML file, which SGLang passes on as true and
    false."""
    words = {"true": "on", "false": "off"}
    return [
        words.get(word, word) if flag in _OURS and "off" in _OURS[flag].kind.words else word
        for flag, word in zip(["", *merged], merged, strict=False)
    ]


def join_tier_values(arguments: Sequence[str]) -> list[str]:
    """Write ``--tier-x value`` as ``--tier-x=value``, so that argparse does not take ``-1GiB`` for
    a flag, and the user gets a sentence on the value instead of the usage."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in _OURS and not argument.startswith("--"):
            joined[-1] += "=" + argument
        else:
            joined.append(argument)
    return joined


def without_our_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that SGLang knows."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in _OURS:
        parser.add_argument(option)
    return parser.parse_known_args(list(arguments))[1]
