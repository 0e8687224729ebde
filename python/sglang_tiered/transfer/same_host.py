"""Reading another process's pages on the same machine: ``process_vm_readv(2)``.

Pages are copied once, pool to pool, by the reader. It needs the right to trace the other process:
same user, and where Yama restricts that, the permission given with ``prctl(PR_SET_PTRACER)``.

The kernel says which processes are involved, not the peers. Prefill listens at a ``Door``, an
abstract Unix socket for datagrams; decode sends the token of their session there. Each learns the
other's process and user from the datagram (``SCM_CREDENTIALS``, unix(7)), and prefill permits that
process to read it. Its answer says where the pages are. Decode reads that process only, and only
what is authenticated with a key received there: a third party may have named the door."""

from __future__ import annotations

import contextlib
import ctypes
import logging
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
    from collections.abc import Iterator, Sequence

    from sglang_tiered.transfer.memory import Pages


MAX_VISITS = 64
"""Visits at one door that are looked at before others have their turn."""

logger = logging.getLogger(__name__)

_DOOR = re.compile(r"sglang-tiered-[0-9a-f]{32}")
_IOV_MAX = 1024
_MAX_OFFER_BYTES = 1 << 17
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)
with contextlib.suppress(AttributeError):  # not on this system: ``PeerMemory`` then never works
    _VECTORS = ctypes.c_void_p, ctypes.c_ulong
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _libc.process_vm_readv.argtypes = [ctypes.c_int, *_VECTORS, *_VECTORS, ctypes.c_ulong]


def _may_be_read_by(pid: int) -> None:
    """Let ``pid`` read this process where Yama forbids it by default; without Yama a no-op."""
    with contextlib.suppress(AttributeError):
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _datagrams() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return made


def _credentials(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[int, int]:
    """Process (0 if it is in another process namespace) and user that sent a datagram."""
    pid, uid, _ = _CREDENTIALS.unpack(ancillary[0][2])
    return pid, uid


def _receive(connection: socket.socket, max_bytes: int) -> tuple[bytes, int, Any]:
    """A datagram, the process that sent it (0 if it is not to be talked to: another user's, or in
    another process namespace), and from where. Raises ``OSError``."""
    # Without room for more: a file that came along would be opened here.
    room = socket.CMSG_LEN(_CREDENTIALS.size)
    data, ancillary, _, address = connection.recvmsg(max_bytes, room)
    pid, uid = _credentials(ancillary)
    return data, pid if uid == os.geteuid() else 0, address


class Door:
    """Where decode ranks of this machine come. Used by one thread. Raises ``OSError`` on systems
    without abstract Unix sockets."""

    def __init__(self) -> None:
        self.name = f"sglang-tiered-{secrets.token_hex(16)}"  # as in ``_DOOR``
        self._socket = _datagrams()
        try:
            self._socket.bind(f"\0{self.name}")
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def visits(self) -> Iterator[tuple[bytes, int, Any]]:
        """What was sent here, the process that sent it, and where it has its answer. Processes of
        other users are turned away."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(MAX_VISITS):
                token, pid, address = _receive(self._socket, messages.TOKEN_BYTES)
                if pid and address:
                    yield token, pid, address

    def admit(self, pid: int, address: Any, buffers: Sequence[Buffer]) -> Tagger | None:
        """Let a process read this one, and say where these buffers are. Returns the tagger of what
        it is asked to read; None if it has left."""
        key = secrets.token_bytes(KEY_BYTES)
        offered = [(buffer.address, buffer.num_bytes, buffer.page_bytes) for buffer in buffers]
        try:
            self._socket.sendto(sockets.encode(messages.Offer(key, offered)), address)
        except OSError:
            return None
        _may_be_read_by(pid)
        return Tagger(key)

    def revoke_permission(self) -> None:
        """Take the permission back after the last reader has gone. Not otherwise: a process has one
        permission, which may be a debugger's."""
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
        self.problem: str | None = None  # why its offer cannot be used
        self._num_buffers = num_buffers
        self._tagger: Tagger | None = None
        self._pid, self._process = 0, -1
        self._connection = _datagrams()
        try:
            self._connection.bind("")  # a name from the system, for the answer
            self._connection.connect(f"\0{name}")  # nobody else is heard
            self._connection.send(token)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def check(self) -> str | None:
        """Why the process cannot be read, if it has ended: another may have its number by now. None
        while it lives."""
        if self._process < 0:
            return "it was closed"
        alive = select.poll()
        alive.register(self._process, select.POLLIN)
        return "the process has ended" if alive.poll(0) else None

    def is_right(self, tag: bytes, *parts: bytes) -> bool:
        """Whether the process behind the door made this authenticator of a ``NAMED`` slab. False
        until it has admitted this one."""
        if self._tagger is None and self.problem is None:
            # The offer was sent before the first message that needs it.
            try:
                self._take_offer(*_receive(self._connection, _MAX_OFFER_BYTES))
            except BlockingIOError:
                pass  # not here yet
            except (TransferError, OSError) as error:  # also a sandbox's, or no files left
                self.problem = str(error)
                logger.info("KV transfer: pages are sent over TCP (%s)", error)
        return self._tagger is not None and self._tagger.is_right(tag, *parts)

    def _take_offer(self, answer: bytes, pid: int, _: Any) -> None:
        """Raises ``TransferError`` or ``OSError`` for one that cannot be used."""
        if not pid:
            raise TransferError("prefill is another user's, or in another process namespace.")
        offer = sockets.decode(answer, messages.offer)
        if len(offer.buffers) != self._num_buffers:
            raise TransferError("prefill offers other buffers than it said.")
        self._pid, self._process = pid, os.pidfd_open(pid)
        self.buffers = [Buffer(*buffer) for buffer in offer.buffers]
        self._tagger = Tagger(offer.key)

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
        if self.problem is not None:
            return self.problem
        check_pages(self.buffers, source_pages, "prefill")
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
                error = self._read(local[part], remote[part])
                if error is not None:
                    return error
        word = np.zeros(1, np.uint64)
        local, remote = (
            np.array([[address, word.nbytes]], np.uint64)
            for address in (word.ctypes.data, fence[0])
        )
        error = self.check() or self._read(local, remote)
        if error is None and int(word[0]) != fence[1]:
            return "its pages are another request's by now"
        return error

    def _read(self, local: Any, remote: Any) -> str | None:
        size = int(local[:, 1].sum())
        read = _libc.process_vm_readv(
            self._pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
        )
        if read == size:
            return None
        return os.strerror(ctypes.get_errno()) if read < 0 else f"{read} of {size} bytes"


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
