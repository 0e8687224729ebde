"""Says what DIR is: a tier directory with its shards, or one shard. Opens only the manifest."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_tiered.errors import StoreError, StoreFormatError
from sglang_tiered.storage.region.directory import DirectoryState, inspect
from sglang_tiered.storage.region.files import (
    CHECKPOINT_NAME,
    ERASED_NAME,
    MANIFEST_NAME,
    OLDER_NAMES,
    SHARD_PREFIX,
    is_shard_file,
)
from sglang_tiered.storage.region.format import parse_region_name
from sglang_tiered.tools.store.holder import find_holder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered.tools.store.holder import Holder

__all__ = ["Shard", "Target", "resolve"]

_WAY_OUT = "pass the --tier-dir of a server, or one of its shard-* directories"
_MANIFEST_BYTES = 256


@dataclass(frozen=True)
class Shard:
    name: str
    path: Path

    def holder(self) -> Holder:
        return find_holder(self.path)


@dataclass(frozen=True)
class Target:
    """Describes DIR. ``manifest`` is the format version it states; ``None`` without a valid one."""

    path: Path
    is_tier: bool
    shards: Sequence[Shard]
    manifest: int | None = None
    notes: list[str] = field(default_factory=list)

    def holder(self) -> Holder:
        return find_holder(self.path)


def resolve(path: Path) -> Target:
    """Find out what DIR is. Raises ``StoreError`` and its kinds for what cannot be read."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist; {_WAY_OUT}") from None
    except NotADirectoryError:
        raise StoreError(f"{path} is not a directory; {_WAY_OUT}") from None
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read ({error.strerror}); fix its permissions or {_WAY_OUT}"
        ) from error
    if _is_shard(path, names):
        return Target(path, False, [Shard(path.resolve().name, path)])
    try:
        state = inspect(path)
    except StoreFormatError:
        raise
    except StoreError as error:
        # Its own way out is meant for a server that wants a directory to write to.
        what = str(error).partition("; ")[0]
        raise type(error)(f"{what}; {_WAY_OUT}") from error
    if state in (DirectoryState.ABSENT, DirectoryState.EMPTY):
        raise StoreError(f"{path} is empty; {_WAY_OUT}")
    notes = []
    manifest = None
    if state is DirectoryState.OURS:
        manifest = _stated_version(path)
    else:
        notes.append(
            f"{MANIFEST_NAME} is missing or does not verify; the next server start writes it again"
        )
    shards = []
    for name in sorted(name for name in names if name.startswith(SHARD_PREFIX)):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR((path / name).lstat().st_mode):
                shards.append(Shard(name, path / name))
            else:
                notes.append(f"{name!a} is not a directory and is left alone")
    return Target(path, True, shards, manifest, notes)


def _is_shard(path: Path, names: Sequence[str]) -> bool:
    if MANIFEST_NAME in names or any(name.startswith(SHARD_PREFIX) for name in names):
        return False
    ours = (CHECKPOINT_NAME, ERASED_NAME, *OLDER_NAMES)
    if any(name in ours or parse_region_name(name) is not None for name in names):
        return True
    return path.resolve().name.startswith(SHARD_PREFIX) and all(map(is_shard_file, names))


def _stated_version(path: Path) -> int | None:
    """Return the version in a manifest that was found valid a moment ago."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path / MANIFEST_NAME, flags)
        try:
            return int(os.read(fd, _MANIFEST_BYTES).split()[2])
        finally:
            os.close(fd)
    return None
