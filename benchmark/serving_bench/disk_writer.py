"""Keeps a disk busy: disk_writer.py FILE rewrites it with direct I/O until it is ended."""

from __future__ import annotations

import itertools
import mmap
import os
import sys

BLOCK_BYTES = 1 << 20
FILE_BLOCKS = 512


def main(path: str) -> None:
    memory = mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as O_DIRECT wants it
    memory.write(os.urandom(BLOCK_BYTES))
    direct = getattr(os, "O_DIRECT", 0)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | direct, 0o600)
        os.pwrite(fd, memory, 0)
    except OSError:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    for number in itertools.count():
        os.pwrite(fd, memory, number % FILE_BLOCKS * BLOCK_BYTES)


if __name__ == "__main__":
    main(sys.argv[1])
