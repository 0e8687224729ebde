"""Where a benchmark writes: a folder on a real disk, removed at the end, and a cold page cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_IN_MEMORY = ("tmpfs", "ramfs")


class UnusableDirectoryError(Exception):
    """Figures taken there would mean nothing, or it cannot hold them. One sentence."""


def filesystem_of(directory: Path, mountinfo: str) -> str:
    """The filesystem's type by the text of /proc/self/mountinfo; ``unknown`` when not listed."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        fields = line.split()
        if len(fields) > 2 and fields[2] == wanted and "-" in fields:
            return fields[fields.index("-") + 1]
    return "unknown"


def default_directory() -> Path:
    """The system's folder for temporary files, or the current one where that is memory."""
    temporary = Path(tempfile.gettempdir())
    return Path.cwd() if _filesystem_here(temporary) in _IN_MEMORY else temporary


def _filesystem_here(directory: Path) -> str:
    with contextlib.suppress(OSError):
        return filesystem_of(directory, Path("/proc/self/mountinfo").read_text())
    return "unknown"


class Workspace:
    """A temporary folder under ``directory``; as a context it is removed however the run ends."""

    def __init__(
        self, directory: Path, *, allow_tmpfs: bool = False, prefix: str = "bench-storage-"
    ) -> None:
        if not directory.is_dir():
            raise UnusableDirectoryError(f"{directory} is not a folder; pass another --directory.")
        self.filesystem = _filesystem_here(directory)
        if self.filesystem in _IN_MEMORY and not allow_tmpfs:
            raise UnusableDirectoryError(
                f"{directory} is {self.filesystem}, where figures of O_DIRECT mean nothing; "
                "pass --directory on a disk, or --allow-tmpfs."
            )
        self._directory = directory.resolve()
        self._prefix = prefix
        self.root = Path()
        self.drops_all = os.access(_DROP_CACHES, os.W_OK)

    def __enter__(self) -> Workspace:
        self.root = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._directory))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def page_cache(self) -> str:
        """How ``settle`` empties the page cache, for the settings of a result."""
        if self.drops_all:
            return "dropped before each sample (3 to /proc/sys/vm/drop_caches)"
        return "posix_fadvise(DONTNEED) per file before each sample; inodes and names stay cached"

    def check_space(self, nbytes: int, num_files: int) -> None:
        """Raises ``UnusableDirectoryError`` unless the filesystem has this to give."""
        status = os.statvfs(self._directory)
        free = status.f_bavail * status.f_frsize
        if free < nbytes:
            raise UnusableDirectoryError(
                f"This run needs {nbytes / 1e9:.0f} GB but {self._directory} has "
                f"{free / 1e9:.0f} GB free; pass another --directory, --quick or --only."
            )
        # Filesystems that make inodes as they go report none at all.
        if status.f_files and status.f_favail < num_files:
            raise UnusableDirectoryError(
                f"This run makes {num_files:,} files but {self._directory} has room for "
                f"{status.f_favail:,}; pass another --directory, --quick or --only."
            )

    @contextlib.contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """A fresh folder, gone with all it holds when the block ends."""
        path = self.root / name
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def settle(self) -> None:
        """Nothing dirty, nothing cached: what ran before shall not be paid for by what comes."""
        os.sync()
        if self.drops_all:
            _DROP_CACHES.write_text("3\n")
        else:
            self._advise_all()

    def make_page_cache_resident(self, num_files: int, file_bytes: int) -> None:
        """Let the kernel have memory for a page cache of that shape at hand, empty.

        A virtual machine may have given its free memory back to the host, and whoever writes
        through the page cache first pays for getting it again: several times what the write
        costs on a machine of its own. Files of the same sizes are made and dropped unwritten.
        """
        content = bytes(file_bytes)
        with self.folder("ballast") as folder:
            for number in range(num_files):
                (folder / str(number)).write_bytes(content)
            for number in range(num_files):
                os.truncate(folder / str(number), 0)  # before it is written back

    def _advise_all(self) -> None:
        for folder, _, names in os.walk(self.root):
            for name in names:
                with contextlib.suppress(OSError):
                    fd = os.open(os.path.join(folder, name), os.O_RDONLY)
                    try:
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    finally:
                        os.close(fd)
