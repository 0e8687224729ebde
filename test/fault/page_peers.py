"""Page servers and clients for tests: honest ones over a dictionary, and ones that are made by hand
to say what no honest one would."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import zmq
from shared_tier import SharedTier
from strange_sockets import Stranger

from kit.waiting import eventually
from sglang_tiered.checksummed import page_checksum
from sglang_tiered.sharing.page_source import PageSource
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.client import PageClient
from sglang_tiered.sharing.pages.messages import VERSION_FRAME
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.sharing.settings import PageSettings
from sglang_tiered.storage.base import Job, JobKind, Run
from sglang_tiered.wire.sockets import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang_tiered.sharing.pages.link import PageFetch, PageOutcome
    from sglang_tiered.storage.jobs import LoadPart

NAMESPACE = b"\x22" * 32
HOST = "127.0.0.1"
DEADLINE_S = 20.0
UNTOUCHED = 0xA5
PATIENT = PageSettings(connect_timeout_s=10.0, answer_timeout_s=20.0, max_reads=2)

Pages = dict[bytes, bytes]


def make_pages(seed: int, sizes: Sequence[int]) -> Pages:
    source = random.Random(seed)
    return {source.randbytes(32): source.randbytes(size) for size in sizes}


@contextmanager
def page_server(pages: Pages, **options: Any) -> Iterator[tuple[PageServer, SharedTier]]:
    """A server, and the tier that it reads."""
    tier = SharedTier()
    for key, page in pages.items():
        tier.submit_store(Run((key,), ((memoryview(page),),)))
    options = {"namespace": NAMESPACE, "settings": PATIENT} | options
    source = PageSource(tier.submit_load, namespace=lambda: NAMESPACE, max_free_bytes=0)
    server = PageServer(source, **options)
    try:
        yield server, tier
    finally:
        server.stop()


@contextmanager
def page_client(settings: PageSettings = PATIENT, **options: Any) -> Iterator[PageClient]:
    client = PageClient(settings, **options)
    try:
        yield client
        eventually(lambda: client.num_fetches == 0)
        client.check_integrity()
    finally:
        client.close()


class Wanted:
    """A fetch with buffers that show what was touched."""

    def __init__(
        self, client: PageClient, port: int, pages: Pages, *, cuts: int = 1, **options: Any
    ) -> None:
        options.setdefault("deadline_s", DEADLINE_S)
        namespace = options.pop("namespace", NAMESPACE)
        self.pages = pages
        self.buffers = {key: bytearray([UNTOUCHED]) * len(page) for key, page in pages.items()}
        self.ended = threading.Event()
        self.at_end: list[bytes] = []
        self.outcomes: dict[bytes, PageOutcome] = {}
        cut = [_segments(memoryview(buffer), cuts) for buffer in self.buffers.values()]
        client.load(
            Job(JobKind.LOAD, Run(tuple(pages), tuple(cut))),
            namespace,
            lambda keys, failed: [None if failed else f"tcp://{HOST}:{port}"] * len(keys),
            learn=self._learn,
            over=self._over,
            **options,
        )

    def _learn(self, part: LoadPart[str], fetch: PageFetch) -> None:
        self.outcomes.update(zip(part.run.keys, fetch.outcomes, strict=True))

    def _over(self, _: Job) -> None:
        self.at_end = [bytes(buffer) for buffer in self.buffers.values()]
        self.ended.set()

    def wait(self) -> list[PageOutcome]:
        assert self.ended.wait(DEADLINE_S), "the fetch did not end"
        return [self.outcomes[key] for key in self.pages]

    @property
    def is_right(self) -> bool:
        return all(bytes(self.buffers[key]) == page for key, page in self.pages.items())

    @property
    def is_untouched(self) -> bool:
        return all(set(buffer) <= {UNTOUCHED} for buffer in self.buffers.values())

    @property
    def is_as_it_ended(self) -> bool:
        return self.at_end == [bytes(buffer) for buffer in self.buffers.values()]


def _segments(buffer: memoryview, cuts: int) -> tuple[memoryview, ...]:
    step = -(-buffer.nbytes // cuts)
    return tuple(buffer[at : at + step] for at in range(0, buffer.nbytes, step))


class StrangeServer(Stranger):
    """A page server: it hears what is asked, and answers what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.socket = self.new_socket(zmq.ROUTER)
        self.port = self.socket.bind_to_random_port(f"tcp://{HOST}")
        self.client = b""

    def hear(self, kind: Any = messages.Fetch) -> Any:
        """The next message of a kind; what comes before it is passed over."""
        while not isinstance(message := self._receive(), kind):
            pass
        return message

    def _receive(self) -> Any:
        self.client, *frames = self.socket.recv_multipart()
        return messages.decode_from_client(frames)

    def hear_all(self, wanted: Wanted, client: PageClient, num_before: int) -> list[Any]:
        """What was asked for a fetch, of a client that had asked ``num_before`` times before it:
        all that it wants, or what it came to until its deadline."""
        asked: list[Any] = []
        while len(asked) < len(wanted.pages):
            if wanted.ended.is_set() and len(asked) == client.num_requests - num_before:
                break
            if self.socket.poll(1) and isinstance(message := self._receive(), messages.Fetch):
                asked.append(message)
        return asked

    def say(self, message: Any, *payload: bytes) -> None:
        self.send(VERSION_FRAME, encode(message), *payload)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.client, *frames])

    def answer(self, asked: messages.Fetch, pages: Pages, number: int | None = None) -> None:
        """As an honest server would, to that number or another."""
        found = [(key, pages.get(key)) for key in asked.split_keys()]
        checksums = [
            None if page is None else page_checksum(asked.namespace, key, [page])
            for key, page in found
        ]
        payload = [page for _, page in found if page is not None]
        self.say(messages.Found(number or asked.number, checksums), *payload)


class StrangeClient(Stranger):
    """A client that says anything."""

    def __init__(self, port: int, hwm: int = 1000) -> None:
        super().__init__()
        self.socket = self.new_socket(zmq.DEALER)
        self.socket.rcvhwm = hwm
        self.socket.connect(f"tcp://{HOST}:{port}")

    def ask(self, number: int, pages: Pages, **changes: Any) -> None:
        fetch = messages.Fetch(
            number, NAMESPACE, b"".join(pages), [len(page) for page in pages.values()], 60_000
        )
        values = {name: getattr(fetch, name) for name in fetch.__struct_fields__} | changes
        self.send(VERSION_FRAME, encode(messages.Fetch(**values)))

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def hear(self) -> tuple[Any, list[bytes]]:
        frames = self.socket.recv_multipart()
        return messages.decode_from_server(frames), frames[2:]
