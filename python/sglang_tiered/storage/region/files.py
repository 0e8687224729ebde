"""Every name that a file of the product can have in a tier directory; no other list of them exists.

The code that recognizes a tier directory, looks into a shard or removes one goes by it. A name that
is missing here keeps a store without its manifest from being opened, and its shard from being
removed.
"""

from __future__ import annotations

import re

from sglang_tiered.storage.region.format import parse_region_name

# Of the tier directory.
MANIFEST_NAME = "STORE"
WEIGHTS_NAME = "WEIGHTS"
SHARD_PREFIX = "shard-"
LOCK_NAME = "LOCK"  # of a shard too

# Of a shard, beside its regions.
ERASED_NAME = "ERASED"
PIN_PREFIX = "PIN-"  # one file for each pin
PROBE_NAME = "PROBE"
LENDING_NAME = "LENDING"  # a socket of the process that has the shard open
NAMESPACE_NAME = "NAMESPACE"
PAGE_SIZES_NAME = "PAGE-SIZES"
TEMPORARY_SUFFIX = ".tmp"

NOTE_NAMES = (NAMESPACE_NAME, PAGE_SIZES_NAME)
EARLIER_NAMES = frozenset({"CHECKPOINT", "CHECKPOINT.tmp"})
"""Of files that the program wrote before: a start removes them."""
LEFTOVER_NAMES = frozenset(
    {
        PROBE_NAME,
        LENDING_NAME,
        *(n + TEMPORARY_SUFFIX for n in (ERASED_NAME, *NOTE_NAMES)),
        *EARLIER_NAMES,
    }
)
"""Gone from a shard that is closed, unless the process that had it open died in it."""
IGNORED_NAMES = frozenset({"lost+found"})
"""The kernel's, not a user's data: a filesystem that is mounted here holds it."""

_SHARD = re.compile(rf"{SHARD_PREFIX}[A-Za-z0-9._-]+")
_PIN = re.compile(rf"{PIN_PREFIX}[0-9a-f]{{32}}")
_TIER_NAMES = frozenset({MANIFEST_NAME, WEIGHTS_NAME, LOCK_NAME})
_TIER_TEMPORARY = re.compile(rf"({MANIFEST_NAME}|{WEIGHTS_NAME})\.tmp-\d+")
_SHARD_NAMES = LEFTOVER_NAMES | {LOCK_NAME, ERASED_NAME, *NOTE_NAMES}


def is_shard_name(name: str) -> bool:
    """Return whether a directory of that name in a tier directory is a shard."""
    return _SHARD.fullmatch(name) is not None


def is_tier_file(name: str) -> bool:
    """Return whether a file of that name in a tier directory is the product's."""
    return name in _TIER_NAMES or is_tier_temporary(name)


def is_tier_temporary(name: str) -> bool:
    """Return whether a process writes a file of a tier directory under that name."""
    return _TIER_TEMPORARY.fullmatch(name) is not None


def is_shard_file(name: str) -> bool:
    """Return whether a file of that name in a shard is the product's, regions included."""
    is_listed = name in _SHARD_NAMES or is_pin_name(name.removesuffix(TEMPORARY_SUFFIX))
    return is_listed or parse_region_name(name) is not None


def pin_name(digest: str) -> str:
    """Return the name of the file of a pin, whose own name has that digest: 32 hex digits."""
    return f"{PIN_PREFIX}{digest}"


def is_pin_name(name: str) -> bool:
    return _PIN.fullmatch(name) is not None
