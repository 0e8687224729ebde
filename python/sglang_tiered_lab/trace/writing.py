"""Writes a trace as Mooncake JSON lines, and other results, to files that appear whole or not."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sglang_tiered.errors import ConfigError
from sglang_tiered_lab.trace import mooncake

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sglang_tiered_lab.trace.request import TraceRequest


_STDOUT = Path("-")


def check_free(path: Path) -> None:
    """Raises ``ConfigError`` where ``new_file`` could not begin; nothing is touched."""
    if path == _STDOUT:
        return
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists already; name a file that does not.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder; make it first, or write elsewhere.")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path.parent} cannot be written; write elsewhere.")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is there once all of it is; ``-`` is standard output."""
    if path == _STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    check_free(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb", buffering=1 << 20) as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)
        _publish(part, path)
    finally:
        part.unlink(missing_ok=True)


def _publish(part: Path, path: Path) -> None:
    try:
        os.link(part, path)  # unlike a rename, never replaces what came meanwhile
    except FileExistsError as error:
        raise ConfigError(f"{path} exists already; name a file that does not.") from error
    except OSError:  # a filesystem without hard links
        check_free(path)
        part.rename(path)


def write_mooncake(requests: Iterable[TraceRequest], path: Path) -> int:
    """How many were written. Every request must have a time."""
    count = 0
    with new_file(path) as file:
        for request in requests:
            file.write(mooncake.encode(request))
            count += 1
    return count
