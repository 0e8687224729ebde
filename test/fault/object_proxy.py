"""A small HTTP proxy before an S3 server that does to chosen requests what networks and stores do.

Rules are matched by method, target and count, so that a run is the same every time. What hangs,
hangs until it is released or the proxy closes.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import select
import socket
import struct
import threading
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from email.message import Message


HOST = "127.0.0.1"
_TIMEOUT_S = 60.0
_FRAMING = {"content-length", "transfer-encoding", "connection", "keep-alive"}


class Request(NamedTuple):
    method: str
    target: str  # path and query, as sent
    headers: Message

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


class Response(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Exchange:
    """One request under way, for a fault to deal with."""

    def __init__(self, proxy: FaultProxy, handler: _Handler) -> None:
        self.proxy, self._handler = proxy, handler
        self.request = Request(handler.command, handler.path, handler.headers)

    def body(self, most: int = 1 << 62) -> bytes:
        return self._handler.rfile.read(min(int(self.request.headers["content-length"] or 0), most))

    @contextlib.contextmanager
    def begin(self) -> Iterator[http.client.HTTPConnection]:
        """Send the head to the server as it came, on a connection of its own."""
        server = http.client.HTTPConnection(*self.proxy.upstream, timeout=_TIMEOUT_S)
        server.connect()
        with contextlib.closing(server), self.proxy.track(server.sock):
            request = self.request
            server.putrequest(
                request.method, request.target, skip_host=True, skip_accept_encoding=True
            )
            for name, value in request.headers.items():
                if name.lower() not in ("connection", "expect"):
                    server.putheader(name, value)
            server.putheader("Connection", "close")
            server.endheaders()
            yield server

    def forward(self) -> Response:
        """Pass the request on whole and take the whole response."""
        body = self.body()
        with self.begin() as server:
            server.send(body)
            with server.getresponse() as found:
                return Response(found.status, found.getheaders(), found.read())

    def answer(self, response: Response) -> None:
        self.answer_head(response)
        self.send(response.body)

    def answer_head(self, response: Response) -> None:
        handler, is_head = self._handler, self.request.method == "HEAD"
        handler.send_response_only(response.status)
        for name, value in response.headers:
            if name.lower() not in _FRAMING or (is_head and name.lower() == "content-length"):
                handler.send_header(name, value)
        if not is_head and response.status != 204:
            handler.send_header("Content-Length", str(len(response.body)))
        handler.end_headers()

    def send(self, data: bytes) -> None:
        if self.request.method != "HEAD":
            self._handler.wfile.write(data)

    def client_is_gone(self) -> bool:
        ready, _, _ = select.select([self._handler.connection], [], [], 0)
        return bool(ready) and self._handler.connection.recv(1, socket.MSG_PEEK) == b""

    def reset(self) -> None:
        """End the connection as a dead host does."""
        _reset(self._handler.connection)
        raise ConnectionAbortedError


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        with self.server.proxy.track(self.connection), contextlib.suppress(OSError):
            super().handle()

    def _deal(self) -> None:
        exchange = Exchange(self.server.proxy, self)
        self.server.proxy.fault_of(exchange.request)(exchange)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _deal  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 256
    proxy: FaultProxy

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        """Close it alone, as it may be that it is to be reset."""
        self.close_request(request)


Fault = Callable[[Exchange], None]
"""Deals with an exchange altogether; ``ConnectionAbortedError`` ends its connection."""


def status(code: int, name: str = "InternalError") -> Fault:
    """An S3 error instead of what was asked for; nothing reaches the server."""

    def fault(exchange: Exchange) -> None:
        exchange.body()
        text = f"<Error><Code>{name}</Code><Message>injected</Message></Error>"
        exchange.answer(Response(code, [("Content-Type", "application/xml")], text.encode()))

    return fault


def expire(tokens: Container[str]) -> Fault:
    """Session tokens in ``tokens`` (looked at each time) are refused; others pass."""

    def fault(exchange: Exchange) -> None:
        if exchange.request.headers["x-amz-security-token"] in tokens:
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
            exchange.answer_head(response)
        until = released or exchange.proxy.closing
        while not (until.wait(0.05) or exchange.proxy.closing.is_set()):
            if exchange.client_is_gone():
                raise ConnectionAbortedError
        if not exchange.proxy.closing.is_set():
            if not after_head:
                exchange.answer_head(response)
            exchange.send(response.body)

    return fault


def truncate(keep: int) -> Fault:
    """The head states the whole length; ``keep`` bytes come, then the end of the stream."""

    def fault(exchange: Exchange) -> None:
        response = exchange.forward()
        exchange.answer_head(response)
        exchange.send(response.body[:keep])
        raise ConnectionAbortedError

    return fault


def replaced(change: Callable[[bytes], bytes]) -> Fault:
    """Other bytes than the server's, and a length that agrees."""

    def fault(exchange: Exchange) -> None:
        response = exchange.forward()
        exchange.answer(response._replace(body=change(response.body)))

    return fault


def shorten(keep: int) -> Fault:
    """Only a reader who knows what it asked for notices."""
    return replaced(lambda body: body[:keep])


def flip(position: int, bit: int = 0) -> Fault:
    """One bit of the response's body, counted from its end when negative."""

    def flipped(body: bytes) -> bytes:
        changed = bytearray(body or b"?")
        changed[position % len(changed)] ^= 1 << bit
        return bytes(changed) if body else b""

    return replaced(flipped)


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
        with exchange.begin() as server:
            server.send(exchange.body(after))
            _reset(server.sock)
        exchange.reset()

    return fault


@dataclass(eq=False)
class Rule:
    """Applies to requests of ``method`` ("*" for any, or a ``Request.kind``) whose target has
    ``pattern``, at most ``count`` times. Later rules go first."""

    method: str
    pattern: re.Pattern[str]
    fault: Fault
    count: int | None
    num_hit: int = 0
    hit: threading.Event = field(default_factory=threading.Event)

    def takes(self, request: Request) -> bool:
        if self.method not in ("*", request.method, request.kind) or self.num_hit == self.count:
            return False
        if not self.pattern.search(request.target):
            return False
        self.num_hit += 1
        self.hit.set()
        return True


class FaultProxy:
    """Thread-safe."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._sockets: set[socket.socket] = set()
        self._server = _Server((HOST, 0), _Handler)
        self._server.proxy = self
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="proxy", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def add(self, method: str, pattern: str, fault: Fault, *, count: int | None = None) -> Rule:
        rule = Rule(method, re.compile(pattern), fault, count)
        with self._lock:
            self._rules.insert(0, rule)
        return rule

    def remove(self, rule: Rule) -> None:
        with self._lock:
            self._rules.remove(rule)

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def fault_of(self, request: Request) -> Fault:
        with self._lock:
            for rule in self._rules:
                if rule.takes(request):
                    return rule.fault
        return lambda exchange: exchange.answer(exchange.forward())

    @contextlib.contextmanager
    def track(self, connection: socket.socket) -> Iterator[None]:
        """Have a connection end with the proxy."""
        with self._lock:
            self._sockets.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(connection)

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()  # waits for all threads
        self._thread.join(_TIMEOUT_S)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
