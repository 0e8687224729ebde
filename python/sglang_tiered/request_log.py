"""``RequestLogConfig``: the file to which a server writes a line for each request, and how it is
opened. What a line says is in ``request_record``."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import FILE, Flag, MiB, format_bytes, size

__all__ = ["DEFAULT_MAX_BYTES", "MIN_MAX_BYTES", "RequestLogConfig", "older", "open_log"]

DEFAULT_MAX_BYTES = 256 * MiB
MIN_MAX_BYTES = MiB
"""A line takes about 1.5 kB; below this, files would replace each other within seconds."""

_MODE = 0o600


class RequestLogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where lines go. Of several replicas (``--dp-size``) each has a file of its own."""

    path: Annotated[
        str,
        Flag(
            "--tier-log-requests",
            FILE,
            "File to which a line of JSON is added for each request that ends: where its tokens "
            "came from, what was planned at which price, and what it waited for. With `--dp-size` "
            "or `--attn-dp-size` above 1 each replica writes `FILE.replicaN`.",
            default="none",
        ),
    ]
    max_bytes: Annotated[
        int,
        Flag(
            "tier-log-requests-bytes",
            size("drop --tier-log-requests to write nothing"),
            "Size at which the file of `--tier-log-requests` is renamed to `FILE.1`, in the place "
            "of the one before, so that both take at most twice that.",
            default="256MiB",
        ),
    ] = DEFAULT_MAX_BYTES
    num_replicas: int = 1

    def __post_init__(self) -> None:
        if self.max_bytes < MIN_MAX_BYTES:
            raise ConfigError(
                f"tier-log-requests-bytes {self.max_bytes} must be at least "
                f"{format_bytes(MIN_MAX_BYTES)}; raise it or drop it."
            )

    def file_of(self, replica: int) -> Path:
        """Return the file of a replica."""
        return Path(self.path if self.num_replicas == 1 else f"{self.path}.replica{replica}")

    def check(self) -> None:
        """Raise ``ConfigError`` if the file cannot be written. Creates it."""
        path = self.file_of(0)
        try:
            os.close(open_log(path))
            if not os.access(path.parent, os.W_OK):
                raise OSError(errno.EACCES, "its directory does not let it be renamed")
            if older(path).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except OSError as error:
            is_link = error.errno == errno.ELOOP
            why = "it is a symbolic link" if is_link else (error.strerror or str(error))
            raise ConfigError(
                f"--tier-log-requests {path} cannot be written ({why}); name a file in a "
                "directory that exists and this user may write to, or drop it."
            ) from error


def older(path: Path) -> Path:
    """Return the file that holds the lines before those of ``path``."""
    return path.with_name(path.name + ".1")


def open_log(path: Path) -> int:
    """Open a file to append to, for its owner only; create it if it is missing. Returns the
    descriptor. Raises ``OSError``, for another user's file too, who could read it, and for what is
    no ordinary file: a pipe would wait for its reader."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, _MODE)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no ordinary file")
        if found.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "it belongs to another user")
        if stat.S_IMODE(found.st_mode) != _MODE:
            os.fchmod(descriptor, _MODE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
