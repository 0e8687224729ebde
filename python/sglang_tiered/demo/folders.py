"""A model's folder: made once, whole or not at all, and read byte by byte before it is used."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.tools.terminal import note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["is_whole", "make_folder"]

_SUMS = "SHA256SUMS"  # as `sha256sum --check` reads them


def is_whole(folder: Path) -> bool:
    """Whether every byte is as it was made: about a second a gigabyte."""
    try:
        return (folder / _SUMS).read_text(encoding="utf-8") == _sums(folder)
    except (OSError, ValueError):
        return False


def make_folder(folder: Path, fill: Callable[[Path], None]) -> bool:
    """Have ``fill`` make the files, unless the folder is whole; replaces one that is not. Returns
    whether this call made it. Processes of one machine take turns, and clear away what one that was
    killed left. Raises ``OSError``, whatever ``fill`` raised: libraries that write files have
    exceptions of their own for a full disk."""
    if is_whole(folder):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _turn(folder.parent) as is_ours:
        if is_whole(folder):
            return False
        if is_ours:
            for left in folder.parent.glob(f".{folder.name}-*"):
                shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            staging.chmod(0o755)
            try:
                fill(staging)
            except OSError:
                raise
            except Exception as error:
                raise OSError(str(error) or type(error).__name__) from error
            (staging / _SUMS).write_text(_sums(staging), encoding="utf-8")
            for file in staging.iterdir():
                file.chmod(0o644)
            return _put(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _put(staging: Path, folder: Path) -> bool:
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
    try:
        os.rename(staging, folder)
    except OSError:  # where locks do not work, somebody was quicker
        if not is_whole(folder):
            raise
        return False
    return True


@contextlib.contextmanager
def _turn(place: Path) -> Iterator[bool]:
    """One process at a time. Gives whether it is: some network file systems lock no folders."""
    handle = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"waiting for another process, which makes a model in {place}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(handle)


def _sums(folder: Path) -> str:
    lines = []
    for path in sorted(folder.iterdir()):
        if path.name != _SUMS and not path.name.startswith("."):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.name}\n")
    return "".join(lines)
