"""A small HTTP proxy before an S3 server that does to chosen requests what networks and stores do.

Rules are matched by method, target and count, so that a run is the same every time. Nothing here
waits for time to pass; what hangs, hangs until it is released or the proxy closes.

    with FaultProxy(server.address) as proxy:
        rule = proxy.add("GET", "/objects/", status(503, "SlowDown"), count=2)
        ...
        assert rule.num_hit == 2
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "HOST",
    "Exchange",
    "Fault",
    "FaultProxy",
    "Request",
    "Response",
    "Rule",
    "drop_upload",
    "expire",
    "flip",
    "hang",
    "lose_response",
    "reset",
    "shorten",
    "status",
    "truncate",
]

HOST = "127.0.0.1"
_TIMEOUT_S = 60.0
_PIECE = 1 << 16
_MAX_HEAD = 1 << 16
_NO_BODY = (204, 304)


class _Gone(Exception):
    """The connection of this exchange is over."""


@dataclass
class Request:
    method: str
    target: str  # path and query, as sent
    headers: list[tuple[str, str]]
    length: int  # of its body; -1 when it comes in chunks

    def header(self, name: str) -> str | None:
        return _header(self.headers, name)

    @property
    def kind(self) -> str:
        """What S3 calls it, as far as tests tell requests apart."""
        path, _, query = self.target.partition("?")
        in_bucket = path.strip("/").count("/") == 0
        if self.method == "GET":
            return "list" if in_bucket else "get"
        if self.method == "POST":
            if query.startswith("delete"):
                return "delete"
            return "begin multipart" if "uploads" in query else "complete multipart"
        if self.method == "DELETE":
            return "abort multipart" if "uploadId" in query else "delete"
        if self.method == "PUT":
            return "part" if "partNumber" in query else "put"
        return self.method.lower()


@dataclass
class Response:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    stated_length: int | None = None  # of the body; None for what it has

    def head(self, method: str) -> bytes:
        length = len(self.body) if self.stated_length is None else self.stated_length
        headers = [(n, v) for n, v in self.headers if n.lower() not in _FRAMING]
        if method == "HEAD":
            headers += [(n, v) for n, v in self.headers if n.lower() == "content-length"]
        elif self.status not in _NO_BODY:
            headers.append(("Content-Length", str(length)))
        lines = [f"HTTP/1.1 {self.status} -", *(f"{name}: {value}" for name, value in headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


_FRAMING = {"content-length", "transfer-encoding", "connection", "keep-alive"}


class Exchange:
    """One request under way, for a fault to deal with."""

    def __init__(self, proxy: FaultProxy, client: _Stream, request: Request) -> None:
        self.proxy, self.client, self.request = proxy, client, request

    def forward(self, body: bytes | None = None) -> Response:
        """Pass the request on whole and take the whole response."""
        if body is None:
            body = self.client.body(self.request.headers)
        with self.proxy._connect() as server:
            server.send(_request_bytes(self.request))
            server.send(body)
            return server.response(self.request.method)

    def answer(self, response: Response) -> None:
        self.client.send(response.head(self.request.method))
        if self.request.method != "HEAD":
            self.client.send(response.body)

    def swallow(self) -> None:
        """Read the request's body and forget it."""
        self.client.body(self.request.headers)

    def reset(self) -> None:
        """End the connection as a dead host does."""
        self.client.reset()
        raise _Gone


Fault = Callable[[Exchange], None]
"""Deals with an exchange altogether; what it does not answer ends the connection."""


def status(code: int, name: str = "InternalError", *, retry_after: int | None = None) -> Fault:
    """An S3 error instead of what was asked for; nothing reaches the server."""

    def fault(exchange: Exchange) -> None:
        exchange.swallow()
        headers = [("Content-Type", "application/xml")]
        if retry_after is not None:
            headers.append(("Retry-After", str(retry_after)))
        text = f"<Error><Code>{name}</Code><Message>injected</Message></Error>"
        exchange.answer(Response(code, headers, text.encode()))

    return fault


def expire(tokens: Iterable[str]) -> Fault:
    """Session tokens in ``tokens`` (looked at each time) are refused; others pass."""

    def fault(exchange: Exchange) -> None:
        if exchange.request.header("x-amz-security-token") in tokens:
            status(403, "ExpiredToken")(exchange)
        else:
            exchange.answer(exchange.forward())

    return fault


def hang(released: threading.Event | None = None, *, after_head: bool = False) -> Fault:
    """No answer, or only its head, until ``released`` is set or the proxy closes; then the
    answer."""

    def fault(exchange: Exchange) -> None:
        response = exchange.forward()
        if after_head:
            exchange.client.send(response.head(exchange.request.method))
        until = released or exchange.proxy.closing
        while not (until.wait(0.05) or exchange.proxy.closing.is_set()):
            if exchange.client.peer_is_gone():
                raise _Gone
        if not exchange.proxy.closing.is_set():
            if after_head:
                exchange.client.send(response.body)
            else:
                exchange.answer(response)

    return fault


def truncate(keep: int) -> Fault:
    """The head states the whole length; ``keep`` bytes come, then the end of the stream."""

    def fault(exchange: Exchange) -> None:
        response = exchange.forward()
        exchange.client.send(response.head(exchange.request.method))
        exchange.client.send(response.body[:keep])
        raise _Gone

    return fault


def shorten(keep: int) -> Fault:
    """Fewer bytes than were asked for, and a length that agrees: only a reader who knows what it
    asked for notices."""

    def fault(exchange: Exchange) -> None:
        response = exchange.forward()
        response.body = response.body[:keep]
        exchange.answer(response)

    return fault


def flip(position: int, bit: int = 0) -> Fault:
    """One bit of the response's body, counted from its end when negative."""

    def fault(exchange: Exchange) -> None:
        response = exchange.forward()
        body = bytearray(response.body)
        if body:
            body[position % len(body)] ^= 1 << bit
        response.body = bytes(body)
        exchange.answer(response)

    return fault


def reset() -> Fault:
    """The connection breaks before the server has seen the request."""
    return Exchange.reset


def lose_response() -> Fault:
    """The server did what it was asked to, and nobody is told."""

    def fault(exchange: Exchange) -> None:
        exchange.forward()
        exchange.reset()

    return fault


def drop_upload(after: int) -> Fault:
    """Both connections break once ``after`` bytes of the request's body have passed."""

    def fault(exchange: Exchange) -> None:
        with exchange.proxy._connect() as server:
            server.send(_request_bytes(exchange.request))
            server.send(exchange.client.read_exactly(min(after, exchange.request.length)))
            server.reset()
        exchange.reset()

    return fault


@dataclass
class Rule:
    """Applies to requests of ``method`` ("*" for any, or a ``Request.kind``) whose target has
    ``pattern``, after ``skip`` of them and at most ``count`` times. Later rules go first."""

    method: str
    pattern: re.Pattern[str]
    fault: Fault
    count: int | None
    skip: int
    num_seen: int = 0
    num_hit: int = 0
    hit: threading.Event = field(default_factory=threading.Event)

    def takes(self, request: Request) -> bool:
        if self.method not in ("*", request.method, request.kind):
            return False
        if not self.pattern.search(request.target):
            return False
        self.num_seen += 1
        if self.num_seen <= self.skip or (self.count is not None and self.num_hit >= self.count):
            return False
        self.num_hit += 1
        self.hit.set()
        return True


class FaultProxy:
    """Thread-safe. ``seen`` counts requests by kind, those included that a fault dealt with."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.closing = threading.Event()
        self._upstream = upstream
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._seen: Counter[str] = Counter()
        self._targets: list[tuple[str, str]] = []
        self._streams: set[_Stream] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((HOST, 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="proxy-accept", daemon=True)
        self._acceptor.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def seen(self) -> Counter[str]:
        with self._lock:
            return self._seen.copy()

    @property
    def targets(self) -> list[tuple[str, str]]:
        """``(kind, target)`` of every request so far."""
        with self._lock:
            return list(self._targets)

    def add(
        self,
        method: str,
        pattern: str,
        fault: Fault,
        *,
        count: int | None = None,
        skip: int = 0,
    ) -> Rule:
        rule = Rule(method, re.compile(pattern), fault, count, skip)
        with self._lock:
            self._rules.insert(0, rule)
        return rule

    def remove(self, *rules: Rule) -> None:
        with self._lock:
            self._rules = [rule for rule in self._rules if rule not in rules]

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def wait_for(self, kind: str, number: int = 1, timeout_s: float = 20.0) -> None:
        """Until ``number`` more requests of a kind have come."""
        goal = self.seen[kind] + number
        deadline = time.monotonic() + timeout_s
        while self.seen[kind] < goal:
            assert time.monotonic() < deadline, f"no {kind} within {timeout_s} s"
            self.closing.wait(0.002)

    def close(self) -> None:
        self.closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(_TIMEOUT_S)
        with self._lock:
            streams, threads = list(self._streams), list(self._threads)
        for stream in streams:
            stream.shut()
        for thread in threads:
            thread.join(_TIMEOUT_S)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="proxy", daemon=True
            )
            with self._lock:
                self._threads = [t for t in self._threads if t.is_alive()]
                self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with self._track(_Stream(connection)) as client, contextlib.suppress(OSError, _Gone):
            while not self.closing.is_set():
                exchange = Exchange(self, client, client.request())
                self._fault(exchange.request)(exchange)

    def _fault(self, request: Request) -> Fault:
        with self._lock:
            self._seen[request.kind] += 1
            self._targets.append((request.kind, request.target))
            for rule in self._rules:
                if rule.takes(request):
                    return rule.fault
        return _pass

    def _connect(self) -> contextlib.AbstractContextManager[_Stream]:
        return self._track(_Stream(socket.create_connection(self._upstream, _TIMEOUT_S)))

    @contextlib.contextmanager
    def _track(self, stream: _Stream) -> Iterable[_Stream]:
        with self._lock:
            self._streams.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._streams.discard(stream)
            stream.close()


def _pass(exchange: Exchange) -> None:
    exchange.answer(exchange.forward())


class _Stream:
    """One connection, of ours or to us."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._read = bytearray()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def request(self) -> Request:
        first, headers = self._head()
        method, target, _ = first.split(" ", 2)
        chunked = "chunked" in (_header(headers, "transfer-encoding") or "")
        length = -1 if chunked else int(_header(headers, "content-length") or 0)
        return Request(method, target, headers, length)

    def response(self, method: str) -> Response:
        first, headers = self._head()
        code = int(first.split(" ", 2)[1])
        empty = method == "HEAD" or code in _NO_BODY
        return Response(code, headers, b"" if empty else self.body(headers, until_end=True))

    def body(self, headers: list[tuple[str, str]], *, until_end: bool = False) -> bytes:
        """What comes behind the head; ``until_end``: all there is, where no length is stated."""
        if "chunked" in (_header(headers, "transfer-encoding") or ""):
            pieces = []
            while size := int(self._line().split(b";")[0], 16):
                pieces.append(self.read_exactly(size))
                self._line()
            while self._line():
                pass
            return b"".join(pieces)
        length = _header(headers, "content-length")
        if length is not None or not until_end:
            return self.read_exactly(int(length or 0))
        with contextlib.suppress(_Gone):
            while True:
                self._fill()
        data, self._read = bytes(self._read), bytearray()
        return data

    def read_exactly(self, size: int) -> bytes:
        while len(self._read) < size:
            self._fill()
        data = bytes(self._read[:size])
        del self._read[:size]
        return data

    def peer_is_gone(self) -> bool:
        try:
            ready, _, _ = select.select([self._socket], [], [], 0)
            return bool(ready) and self._socket.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    def reset(self) -> None:
        linger = struct.pack("ii", 1, 0)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._socket.close()

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _fill(self) -> None:
        piece = self._socket.recv(_PIECE)
        if not piece:
            raise _Gone
        self._read += piece

    def _line(self) -> bytes:
        while (end := self._read.find(b"\r\n")) < 0:
            self._fill()
        line = bytes(self._read[:end])
        del self._read[: end + 2]
        return line

    def _head(self) -> tuple[str, list[tuple[str, str]]]:
        first = self._line().decode("latin-1")
        headers = []
        size = 0
        while line := self._line().decode("latin-1"):
            name, _, value = line.partition(":")
            headers.append((name, value.strip()))
            size += len(line)
            if size > _MAX_HEAD:
                raise _Gone
        return first, headers


def _header(headers: list[tuple[str, str]], name: str) -> str | None:
    return next((value for n, value in headers if n.lower() == name), None)


def _request_bytes(request: Request) -> bytes:
    """The head for the server: as it came, on a connection of its own."""
    headers = [(n, v) for n, v in request.headers if n.lower() not in ("connection", "expect")]
    headers.append(("Connection", "close"))
    if request.length < 0:
        headers = [(n, v) for n, v in headers if n.lower() != "transfer-encoding"]
    lines = [
        f"{request.method} {request.target} HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
