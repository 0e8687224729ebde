"""Reading another process's pages on the same machine: ``process_vm_readv(2)``.

Pages are copied once, pool to pool, by the reader: no other process writes into its memory. It
needs the right to trace the other process (same user, and where Yama restricts that, the permission
given with ``prctl(PR_SET_PTRACER)``).

The kernel says which processes are involved, not the peers. Prefill listens at a ``Door``, an
abstract Unix socket; decode connects there with the token of their session. Each learns the other's
process and user from the socket (``SO_PEERCRED``, unix(7)), and prefill permits that process to
read it. Decode learns there where the pages are. It reads that process only, and only what is
authenticated with a key received there: a third party may have named the door."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import select
import socket
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.memory import Buffer, check_pages
from sglang_tiered.wire import sockets
from sglang_tiered.wire.keys import KEY_BYTES, Tagger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.transfer.memory import Pages

__all__ = ["Door", "Fence", "Guest", "PeerMemory"]

MAX_GUESTS = 256
"""Guests at one door that have not sent their session's token yet."""

_DOOR = re.compile(r"sglang-tiered-[0-9a-f]{32}")
_BACKLOG = 64
_IOV_MAX = 1024
_MAX_OFFER_BYTES = 1 << 17
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
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


def _may_be_read_by(pid: int) -> None:
    """Let ``pid`` read this process where Yama forbids it by default; without Yama a no-op."""
    with contextlib.suppress(AttributeError):
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process (0 if it is in another process namespace) and user at the other end."""
    size = _CREDENTIALS.size
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class Guest:
    """A process of this machine and this user that has come to the door. ``close`` it once."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._pid = pid

    def fileno(self) -> int:
        return self._connection.fileno()

    def read_token(self) -> bytes | None:
        """The session token that it sent; None while it has not, empty if it left."""
        try:
            return self._connection.recv(messages.TOKEN_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def offer_buffers(self, buffers: Sequence[Buffer]) -> Tagger | None:
        """Let its process read this one, and say where these buffers are. Returns the tagger for
        the pulls that it is sent; None if it has left."""
        key = secrets.token_bytes(KEY_BYTES)
        offered = [(buffer.address, buffer.num_bytes, buffer.page_bytes) for buffer in buffers]
        try:
            self._connection.send(sockets.encode(messages.Offer(key, offered)))
        except OSError:
            return None
        _may_be_read_by(self._pid)
        return Tagger(key)

    def close(self) -> None:
        self._connection.close()


class Door:
    """Where decode ranks of this machine connect. Used by one thread. Raises ``OSError`` on systems
    without abstract Unix sockets."""

    def __init__(self) -> None:
        self.name = f"sglang-tiered-{secrets.token_hex(16)}"  # as in ``_DOOR``
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Guest | None:
        """The next guest, or None. Processes of other users are turned away. Raises ``OSError``
        without file descriptors or memory for a connection."""
        for _ in range(_BACKLOG):  # others have their turn too, however many come
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                break
            connection.setblocking(False)
            pid, uid = _credentials(connection)
            if pid and uid == os.geteuid():
                return Guest(connection, pid)
            connection.close()
        return None

    def revoke_permission(self) -> None:
        """Take the permission back after the last admitted guest has gone. Not otherwise: a process
        has one permission, which may be a debugger's."""
        _may_be_read_by(0)

    def close(self) -> None:
        self._socket.close()


class Fence:
    """A word in memory that is nonzero while a room owns its pages. A reader checks it after the
    copy, since the pages may have gone to another request meanwhile. ``close`` and ``is_open`` may
    be called on any thread."""

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
        """Close the fence, before the pages are used for anything else."""
        self._word.value = 0


class PeerMemory:
    """The pages of the process behind a door, in ``num_buffers`` buffers. Used by one thread;
    ``close`` it once.

    Raises ``OSError``, with the reason, if that process cannot be read.
    """

    def __init__(self, name: str, token: bytes, num_buffers: int) -> None:
        if not hasattr(_libc, "process_vm_readv") or not hasattr(os, "pidfd_open"):
            raise OSError("no process_vm_readv here")
        if not _DOOR.fullmatch(name):  # else a stranger could name any program's socket
            raise OSError("not the name of a door")
        self.buffers: Sequence[Buffer] = ()  # the other process's, once known
        self.is_unusable = False  # that process's offer does not fit
        self._num_buffers = num_buffers
        self._tagger: Tagger | None = None
        self._process: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.setblocking(False)
            self._connection.connect(f"\0{name}")
            self._pid, uid = _credentials(self._connection)
            if not self._pid:
                raise OSError("another process namespace")
            if uid != os.geteuid():
                raise OSError("another user's process")
            self._process = os.pidfd_open(self._pid)
            self._connection.send(token)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()
        if self._process is not None:
            os.close(self._process)
            self._process = None

    def check(self) -> str | None:
        """Why the process cannot be read, if it has ended: another may have its number by now. None
        while it lives."""
        if self._process is None:
            return "it was closed"
        alive = select.poll()
        alive.register(self._process, select.POLLIN)
        return "the process has ended" if alive.poll(0) else None

    def is_right(self, tag: bytes, *parts: bytes) -> bool:
        """Whether the process behind the door made this authenticator of a ``NAMED`` slab. False
        until it has admitted this one."""
        if self._tagger is None and not self.is_unusable:
            # The offer was sent before the first message that needs it.
            try:
                answer = self._connection.recv(_MAX_OFFER_BYTES)
            except OSError:
                return False
            if answer and not self._accept_offer(answer):
                self.is_unusable = True
        return self._tagger is not None and self._tagger.is_right(tag, *parts)

    def _accept_offer(self, answer: bytes) -> bool:
        try:
            offer = sockets.decode(answer, messages.offer)
        except TransferError:
            return False
        if len(offer.buffers) != self._num_buffers:
            return False
        self.buffers = [Buffer(*buffer) for buffer in offer.buffers]
        self._tagger = Tagger(offer.key)
        return True

    def pull(
        self,
        pairs: Sequence[tuple[int, Buffer]],
        source_pages: Pages,
        pages: Pages,
        fence: tuple[int, int],
    ) -> str | None:
        """Copy ``source_pages`` of the peer's buffer to ``pages`` of the own one, for each pair of
        (peer's buffer index, own buffer), as an authentic message asked. Returns why it failed, or
        None when all bytes are there, the peer was still the same process after the copy, and
        ``fence`` (address, value) was still open. Raises ``TransferError`` for pages that
        the peer's buffers do not have."""
        if self.is_unusable:
            return "its offer cannot be used"
        check_pages(self, source_pages, "prefill")
        for index, buffer in pairs:
            if self.buffers[index].page_bytes != buffer.page_bytes:
                raise TransferError(f"prefill has other pages in buffer {index} than it said.")
        source_runs, runs, lengths = _runs(source_pages, pages)
        for index, buffer in pairs:
            size = buffer.page_bytes
            remote = _vectors(self.buffers[index].address, source_runs, lengths, size)
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
            self._pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
        )
        if read == num_bytes:
            return None
        return os.strerror(ctypes.get_errno()) if read < 0 else f"{read} of {num_bytes} bytes"


def _runs(source_pages: Pages, pages: Pages) -> tuple[Any, Any, Any]:
    """The first page of each run that is consecutive on both sides, and its length in pages."""
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
