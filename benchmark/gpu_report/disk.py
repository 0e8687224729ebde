"""Where the tiers of the report lie, and what a machine gives them."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

from sglang_tiered.storage.filesystem import MEMORY_FILESYSTEMS, filesystem_type

ROOM_BYTES = 42 * 10**9
"""16 GB of weights, 20 of a tier, and some."""


PLACES = (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.home())


def choose_disk() -> Path:
    """A folder that stays between two runs: that of an earlier run, else on the first disk with
    room that takes ``O_DIRECT``, else among temporary files. Memory that takes it is no disk."""
    folders = [place / "gpu-report-disk" for place in PLACES]
    for folder in folders:
        if (folder / "model" / "config.json").exists():
            return folder
    for folder in folders:
        place = folder.parent
        if (
            filesystem_type(place) not in MEMORY_FILESYSTEMS
            and takes_direct(place)
            and shutil.disk_usage(place).free >= ROOM_BYTES
        ):
            return folder
    return Path(tempfile.gettempdir()) / "gpu-report-disk"


def takes_direct(folder: Path) -> bool:
    """Whether a file there can be written past the page cache."""
    path = folder / f".direct-{os.getpid()}"
    try:
        with mmap.mmap(-1, 4096) as block:
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
            try:
                os.pwrite(file, block, 0)
            finally:
                os.close(file)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True
