"""``PageLender``: gives other processes of this server pages of the store that this one has open.

A thread per connection reads the pages into its own memory, through the engine that its owner reads
with (so they are verified, and come from wherever that engine finds them), and sends them. While
one piece is sent the next is read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.errors import StoreError
from sglang_tiered.storage.base import Reason, Run
from sglang_tiered.storage.lending.wire import (
    Request,
    decode_request,
    receive_message,
    send_message,
    send_segments,
    short_path,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sglang_tiered.storage.base import Job

__all__ = ["PageLender"]

PIECE_BYTES = 8 << 20
"""Read at once for a borrower, or one page where that is larger; a connection keeps twice that."""

JOIN_S = 5.0
RETRY_S = 1.0
_REASONS = {reason: number for number, reason in enumerate(Reason)}

logger = logging.getLogger(__name__)


class PageLender:
    """Lends pages from construction to ``close``; the caller has the shard locked. ``submit``
    begins a load. Raises ``StoreError`` where nothing can listen in the shard."""

    def __init__(self, shard: Path, submit: Callable[[Run], Job]) -> None:
        self._submit = submit
        self._claim: bytes | None = None
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(shard) as path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # of a process that was killed: we hold the shard
                self._socket.bind(path)
                os.chmod(path, 0o600)
                self._socket.listen()
                self._ours = os.lstat(path)
        except OSError as error:
            self._socket.close()
            raise StoreError(
                f"{shard} takes no socket ({error.strerror}), by which ranks share its pages; pass "
                "another --tier-dir"
            ) from error
        self._shard = shard
        self._thread = threading.Thread(target=self._accept, name="tier-lender", daemon=True)
        self._thread.start()

    @property
    def claim(self) -> bytes | None:
        """Return what the pages are taken to be. They go only to a borrower with the same claim,
        and to no borrower while it is None. The owner sets None before it changes what the engine
        finds, and the new claim afterwards."""
        return self._claim

    @claim.setter
    def claim(self, claim: bytes | None) -> None:
        self._claim = claim

    def close(self) -> None:
        """Give nothing from now on, and wait a moment for what is being read. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            connections = dict(self._connections)
        for each in (self._socket, *connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError), short_path(self._shard) as path:
            if os.path.samestat(os.lstat(path), self._ours):  # not that of who found our name free
                os.unlink(path)
        deadline = time.monotonic() + JOIN_S
        for thread in (self._thread, *connections.values()):
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                # Too many open files, most likely: the other rank waits until it is over.
                logger.warning(
                    "cannot accept another rank (%s); it waits for pages", error.strerror
                )
                self._closing.wait(RETRY_S)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="tier-lending", daemon=True
            )
            with self._lock:
                if self._closing.is_set():
                    connection.close()
                    return
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        rooms = [bytearray(), bytearray()]
        try:
            while (message := receive_message(connection)) is not None:
                self._answer(connection, decode_request(message), rooms)
        except (OSError, msgspec.DecodeError):
            pass  # the borrower is gone, or ends with us
        except Exception:
            logger.exception("internal error while lending pages; the connection is closed")
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _answer(self, connection: socket.socket, request: Request, rooms: list[bytearray]) -> None:
        pieces = _pieces(request.lengths)
        ahead = self._begin(request, pieces[0], rooms, 0) if pieces else None
        for number, piece in enumerate(pieces):
            job, is_last = ahead, number + 1 == len(pieces)
            ahead = None if is_last else self._begin(request, pieces[number + 1], rooms, number + 1)
            reasons = [Reason.MISS] * len(piece)
            if job is not None:
                job.wait()
                # What was found since the claim changed is something else.
                reasons = job.reasons if request.claim == self._claim else reasons
            send_message(connection, bytes(_REASONS[reason] for reason in reasons))
            if job is not None:
                pages = zip(job.run.pages, reasons, strict=True)
                send_segments(connection, [page[0] for page, r in pages if r is Reason.OK])

    def _begin(
        self, request: Request, piece: range, rooms: list[bytearray], number: int
    ) -> Job | None:
        """Begin to read the pages of a request; None where its claim is another one."""
        if request.claim != self._claim or self._closing.is_set():
            return None
        lengths = request.lengths[piece.start : piece.stop]
        if len(rooms[number % 2]) < sum(lengths):
            rooms[number % 2] = bytearray(sum(lengths))
        room, at, pages = memoryview(rooms[number % 2]), 0, []
        for length in lengths:
            pages.append((room[at : at + length],))
            at += length
        return self._submit(Run(tuple(request.keys[piece.start : piece.stop]), tuple(pages)))


def _pieces(lengths: list[int]) -> list[range]:
    pieces, start, num_bytes = [], 0, 0
    for at, length in enumerate(lengths):
        if num_bytes and num_bytes + length > PIECE_BYTES:
            pieces.append(range(start, at))
            start, num_bytes = at, 0
        num_bytes += length
    if lengths:
        pieces.append(range(start, len(lengths)))
    return pieces
