"""One connection to Redis: bounded in time and in bytes, with failures that are safe to show.

The text of an error from Redis is never shown, since it may repeat arguments, also of ``AUTH``. Its
first word is enough.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

from redis import exceptions
from redis._parsers.resp2 import _RESP2Parser
from redis._parsers.socket import SocketBuffer

if TYPE_CHECKING:
    from sglang_tiered.sharing.locality.url import IndexUrl

    Command = tuple[bytes | str | int, ...]

__all__ = ["MAX_REPLY_BYTES", "IndexConnection", "IndexFailure", "ReplyTooLargeError"]

MAX_REPLY_BYTES = 32 << 20
"""Bounds all answers to one exchange, and so the memory that they can cost."""

_READ_BYTES = 64 << 10
_WRITE_REFUSED = {
    "OOM": "it is out of memory (maxmemory)",
    "READONLY": "it is a read-only replica",
    "MISCONF": "it refuses writes because it cannot save them",
    "NOREPLICAS": "it refuses writes because it has too few replicas",
}
_REFUSALS = _WRITE_REFUSED | {
    "NOAUTH": "it wants a password",
    "WRONGPASS": "user or password is wrong",
    "NOPERM": "the user may not run a command or touch a key that is needed",
    "LOADING": "it is still loading its data",
    "MASTERDOWN": "it is a replica that lost its master",
    "CLUSTERDOWN": "its cluster is down",
    "MOVED": "it is a cluster of several shards, which cannot hold an index",
    "BUSY": "it is busy with a script",
    "WRONGTYPE": "a key of the index is of another type",
    "ERR": "it does not know a command of the index; is it older than Redis 6.2?",
}


class IndexFailure(Exception):  # noqa: N818
    """An exchange that failed. ``clause`` may be shown; the text of its cause may not."""

    def __init__(self, clause: str, *, word: str = "", is_too_large: bool = False) -> None:
        super().__init__(clause)
        self.clause = clause
        self.word = word  # the first word of Redis' error; empty without an answer
        self.is_too_large = is_too_large

    @property
    def is_out_of_memory(self) -> bool:
        return self.word == "OOM"

    @property
    def is_wrong_type(self) -> bool:
        return self.word == "WRONGTYPE"


class ReplyTooLargeError(exceptions.InvalidResponse):
    """An answer exceeds the bound: a value that no server of this kind writes."""


class _BoundedBuffer(SocketBuffer):
    """Bounds ``_buffer``, which holds everything that was read and not yet parsed."""

    def _read_from_socket(self, length: int | None = None, *args: Any, **kwargs: Any) -> bool:
        position = self._buffer.tell()
        size = self._buffer.seek(0, os.SEEK_END)
        self._buffer.seek(position)
        if size + (length or 0) > MAX_REPLY_BYTES:
            raise ReplyTooLargeError(f"an answer of more than {MAX_REPLY_BYTES} bytes")
        return bool(super()._read_from_socket(length, *args, **kwargs))


class _BoundedParser(_RESP2Parser):
    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        sock = connection._sock  # noqa: SLF001
        self._buffer = _BoundedBuffer(sock, self.socket_read_size, connection.socket_timeout)


class IndexConnection:
    """Used by one thread, except for ``interrupt``. Connects with the first exchange, and again
    after one without an answer. In a process forked from the one that made it, every exchange
    fails."""

    def __init__(self, url: IndexUrl, timeout_s: float) -> None:
        self._pid = os.getpid()
        self._url = url
        options: dict[str, Any] = {
            **url.options,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "socket_read_size": _READ_BYTES,
            "parser_class": _BoundedParser,
            "protocol": 2,
        }
        if "host" in options:
            options["socket_keepalive"] = True
        self._connection: Any = url.kind(**options)
        self._answered = False

    def __repr__(self) -> str:
        return f"IndexConnection({self._url.shown})"

    @property
    def is_open(self) -> bool:
        """Whether the last exchange was answered."""
        return self._answered

    def exchange(self, *commands: Command) -> list[Any]:
        """Send commands together and return their answers, undecoded. All are tried, in order, even
        if one is refused. Raises ``IndexFailure``."""
        answers = self.try_exchange(*commands)
        for answer in answers:
            if isinstance(answer, IndexFailure):
                raise answer
        return answers

    def try_exchange(self, *commands: Command) -> list[Any]:
        """Like ``exchange``, but the answer of a refused command is its failure."""
        if self._pid != os.getpid():
            raise IndexFailure("the connection belongs to another process")
        self._answered = False
        try:
            self._connection.connect()
            packed = self._connection.pack_commands(commands)
            self._connection.send_packed_command(packed, check_health=False)
            answers = [self._answer() for _ in commands]
        except exceptions.ResponseError as error:  # while connecting: AUTH, SELECT
            self.close()
            raise _refusal(error) from None
        except (exceptions.RedisError, OSError, ValueError) as error:
            self.close()
            too_large = isinstance(error, ReplyTooLargeError)
            raise IndexFailure(_clause(error), is_too_large=too_large) from None
        self._answered = True
        return answers

    def _answer(self) -> Any:
        try:
            return self._connection.read_response(disable_decoding=True)
        except exceptions.ResponseError as error:
            return _refusal(error)

    def interrupt(self) -> None:
        """End an exchange under way, from another thread."""
        sock = self._connection._sock  # noqa: SLF001
        if sock is not None and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._answered = False
        if self._pid == os.getpid():
            with contextlib.suppress(Exception):
                self._connection.disconnect()


def _refusal(error: exceptions.ResponseError) -> IndexFailure:
    # redis-py removes the word from errors that it has a class for.
    words = {
        exceptions.NoPermissionError: "NOPERM",
        exceptions.OutOfMemoryError: "OOM",
        exceptions.ReadOnlyError: "READONLY",
        exceptions.MovedError: "MOVED",
        exceptions.MasterDownError: "MASTERDOWN",
        exceptions.ClusterDownError: "CLUSTERDOWN",
    }
    word = next((word for kind, word in words.items() if isinstance(error, kind)), "")
    first = str(error).split(" ", 1)[0]
    word = word or (first if first.isupper() and first.isalnum() and len(first) <= 16 else "ERR")
    return IndexFailure(_REFUSALS.get(word, f"it answered with an error ({word})"), word=word)


def _clause(error: Exception) -> str:
    if isinstance(error, ReplyTooLargeError):
        return "it holds a value that is too large for an index"
    if isinstance(error, exceptions.AuthenticationError):
        return _REFUSALS["NOAUTH" if "required" in str(error).lower() else "WRONGPASS"]
    if isinstance(error, exceptions.BusyLoadingError):
        return _REFUSALS["LOADING"]
    if isinstance(error, exceptions.TimeoutError | TimeoutError):
        return "it did not answer in time"
    if isinstance(error, exceptions.InvalidResponse):
        return "the server there does not speak Redis' protocol"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "its certificate is not trusted"
    return "no connection"
