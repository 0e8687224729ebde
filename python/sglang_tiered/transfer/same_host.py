"""Reading another process's pages on the same machine: ``process_vm_readv(2)``.

One copy, pool to pool, and the reader stays in control: nothing is written into its memory by
anyone else. Needs the right to trace the other process (same user, and where Yama restricts it the
permission given with ``prctl(PR_SET_PTRACER)``), which is why it is probed before it is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.transfer.messages import SameHostOffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.transfer.memory import Buffer, Pages

__all__ = ["MAX_PULL_BYTES", "Fence", "Nonce", "PeerMemory", "boot_id", "may_be_read_by"]

MAX_PULL_BYTES = 8 << 20
"""What one message lets the reader copy in one go; between two it looks after its sockets."""

_NONCE_BYTES = 16
_IOV_MAX = 1024
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)
with contextlib.suppress(AttributeError):  # not on this system: ``PeerMemory`` then never works
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _libc.process_vm_readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


def boot_id() -> str:
    """Names this boot of this machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def may_be_read_by(pid: int) -> None:
    """Let ``pid`` read this process where Yama forbids it by default; without Yama a no-op."""
    with contextlib.suppress(AttributeError):
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


class Nonce:
    """Random bytes at a fixed address of this process, by which a reader knows it."""

    def __init__(self) -> None:
        self.value = secrets.token_bytes(_NONCE_BYTES)
        self._memory = ctypes.create_string_buffer(self.value, _NONCE_BYTES)

    def offer(self, buffers: Sequence[Buffer]) -> SameHostOffer:
        return SameHostOffer(
            boot_id(),
            os.getpid(),
            ctypes.addressof(self._memory),
            self.value,
            [buffer.address for buffer in buffers],
        )


class Fence:
    """A word that stands while a room's pages are the room's: who reads them looks at it after the
    copy, since its owner may have given them to another request meanwhile. ``close`` and
    ``is_open`` on any thread."""

    def __init__(self) -> None:
        self.value = secrets.randbits(63) + 1
        self._word = ctypes.c_uint64(self.value)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._word)

    @property
    def is_open(self) -> bool:
        return self._word.value != 0

    def close(self) -> None:
        """Before the pages are used for anything else."""
        self._word.value = 0


class PeerMemory:
    """The pages of a process on this machine. One thread."""

    def __init__(self, offer: SameHostOffer) -> None:
        self._offer = offer
        self._seen = ctypes.create_string_buffer(_NONCE_BYTES)

    def problem(self) -> str | None:
        """Why the process cannot be read, or None."""
        if not self._offer.boot_id or self._offer.boot_id != boot_id():
            return "another machine"
        if not hasattr(_libc, "process_vm_readv"):
            return "no process_vm_readv here"
        return self.check()

    def check(self) -> str | None:
        """None while the process behind the pid is the one that made the offer."""
        ctypes.memset(self._seen, 0, _NONCE_BYTES)
        local = np.array([[ctypes.addressof(self._seen), _NONCE_BYTES]], np.uint64)
        remote = np.array([[self._offer.nonce_address, _NONCE_BYTES]], np.uint64)
        error = self._read(local, remote, _NONCE_BYTES)
        if error is None and self._seen.raw != self._offer.nonce:
            return "another process has its number"
        return error

    def pull(
        self,
        pairs: Sequence[tuple[int, Buffer]],
        source_pages: Pages,
        pages: Pages,
        fence: tuple[int, int],
    ) -> str | None:
        """Copy ``source_pages`` of the peer's buffer to ``pages`` of ours, for each pair of
        (its buffer index, our buffer). Returns why it failed, or None once all bytes are there
        and the peer has proved, after the copy, to be the process it was, with the word of
        ``fence`` (address, value) still standing."""
        source_runs, runs, lengths = _runs(source_pages, pages)
        for index, buffer in pairs:
            size = buffer.page_bytes
            remote = _vectors(self._offer.addresses[index], source_runs, lengths, size)
            local = _vectors(buffer.address, runs, lengths, size)
            for low in range(0, len(local), _IOV_MAX):
                part = slice(low, low + _IOV_MAX)
                total = int(local[part, 1].sum())
                error = self._read(local[part], remote[part], total)
                if error is not None:
                    return error
        return self.check() or self._check_fence(*fence)

    def _check_fence(self, address: int, value: int) -> str | None:
        word = np.zeros(1, np.uint64)
        local = np.array([[word.ctypes.data, word.nbytes]], np.uint64)
        error = self._read(local, np.array([[address, word.nbytes]], np.uint64), word.nbytes)
        if error is None and int(word[0]) != value:
            return "its pages are another request's by now"
        return error

    def _read(self, local: Any, remote: Any, num_bytes: int) -> str | None:
        read = _libc.process_vm_readv(
            self._offer.pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
        )
        if read == num_bytes:
            return None
        return os.strerror(ctypes.get_errno()) if read < 0 else f"{read} of {num_bytes} bytes"


def _runs(source_pages: Pages, pages: Pages) -> tuple[Any, Any, Any]:
    """First page of each run that is consecutive on both sides, and its length in pages."""
    breaks = np.flatnonzero((np.diff(source_pages) != 1) | (np.diff(pages) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(pages)])))
    return source_pages[starts], pages[starts], lengths


def _vectors(address: int, first_pages: Any, lengths: Any, page_bytes: int) -> Any:
    """``struct iovec`` of each run, as [runs, 2] of address and length."""
    vectors = np.empty((len(lengths), 2), np.uint64)
    vectors[:, 0] = address + first_pages.astype(np.uint64) * np.uint64(page_bytes)
    vectors[:, 1] = lengths * page_bytes
    return vectors
