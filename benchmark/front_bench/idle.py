"""Servers that have nothing to do: each answers a completion with as many chunks as are asked for,
at a fixed pace, and tells costs as an idle server does. A process of its own.

    python benchmark/front_bench/idle.py RECORD PORT...

``RECORD`` is a file with the answer to ``GET /tier/costs``. Written on asyncio's protocols, as it
stands beside what is measured and must cost little.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

PACE_S = 0.01
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": *(\d+)')
_CHUNK = b'22\r\ndata: {"choices":[{"text":"a"}]}\n\n\r\n'
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Idle(asyncio.Protocol):
    """One connection."""

    def __init__(self, record: bytes) -> None:
        self._record, self._buffer = record, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end])
            found = _LENGTH.search(head)
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < whole:
                return
            body = bytes(self._buffer[end + 4 : whole])
            del self._buffer[:whole]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"POST"):
            found = _TOKENS.search(body)
            self._transport.write(_HEAD + _CHUNK)
            self._go_on(int(found[1]) - 1 if found else 0, asyncio.get_running_loop().time())
            return
        told = self._record if head.startswith(b"GET /tier/costs") else b"{}"
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
        self._transport.write(b"Content-Length: %d\r\n\r\n" % len(told) + told)

    def _go_on(self, left: int, due_s: float) -> None:
        if self._transport.is_closing():
            return
        if not left:
            self._transport.write(b"0\r\n\r\n")
            return
        loop = asyncio.get_running_loop()

        def write() -> None:
            self._transport.write(_CHUNK)
            self._go_on(left - 1, due_s + PACE_S)

        loop.call_at(due_s + PACE_S, write)


async def serve(record: bytes, ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: Idle(record), "127.0.0.1", port)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]).read_bytes(), [int(one) for one in sys.argv[2:]]))
