"""A router that subscribes to a live server is told where prefixes lie, down to the bucket."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from conftest import PAGE, SMALL, Launch, aligned, make_prompts
from server_process import free_port

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 60.0
TENANT = {"extra_key": "tenant-a"}
LENGTH = 700
NUM_PAGES = aligned(LENGTH) // PAGE


class Router:
    """Subscribes, and keeps what it was told: blocks by medium."""

    def __init__(self, socket: zmq.Socket[bytes], port: int) -> None:
        self.socket = socket
        socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        socket.connect(f"tcp://127.0.0.1:{port}")
        self.media: dict[str, set[int]] = {}
        self.tokens: dict[str, dict[int, tuple[list[int], int | None]]] = {}
        self.num_cleared = 0

    def read_until(self, is_done: Callable[[], bool]) -> None:
        """Take events until then. Fails at the deadline with what is known."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_done():
            counts = {medium: len(blocks) for medium, blocks in self.media.items()}
            assert time.monotonic() < deadline, f"{counts}, cleared {self.num_cleared} times"
            if self.socket.poll(500):
                for event in msgspec.msgpack.decode(self.socket.recv_multipart()[2])[1]:
                    self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.num_cleared += 1
            self.media.clear()
        elif event["type"] == "BlockRemoved":
            self.media[event["medium"]] -= set(event["block_hashes"])
        else:
            blocks, size = event["block_hashes"], event["block_size"]
            self.media.setdefault(event["medium"], set()).update(blocks)
            parents = [event["parent_block_hash"], *blocks]
            for at, block in enumerate(blocks):
                tokens = event["token_ids"][at * size : (at + 1) * size]
                self.tokens.setdefault(event["medium"], {})[block] = tokens, parents[at]

    def count(self, medium: str) -> int:
        return len(self.media.get(medium, ()))


@pytest.fixture
def socket() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        yield socket


def test_events_follow_pages_on_disk_and_in_bucket(
    launch: Launch, socket: zmq.Socket[bytes], tmp_path: Path
) -> None:
    port = free_port()
    config = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "bind": True}
    router = Router(socket, port)
    server = launch(
        *(*SMALL, "--tier-dir", str(tmp_path / "kv"), "--tier-object-url", f"{tmp_path}/bucket"),
        *("--kv-events-config", json.dumps({**config, "topic": "kv"})),
    )
    prompts = make_prompts(11, 3, LENGTH)
    answers = [server.generate(prompts[0]), server.generate(prompts[1])]
    server.generate(prompts[2], **TENANT)
    router.read_until(lambda: router.count("DISK") >= 3 * NUM_PAGES)

    # The same blocks as in device memory: hashes, tokens and parents.
    on_disk = router.tokens["DISK"]
    assert {block: router.tokens["GPU"][block] for block in on_disk} == on_disk
    for prompt in prompts:
        pages = [prompt[start : start + PAGE] for start in range(0, aligned(LENGTH), PAGE)]
        assert all(page in [tokens for tokens, _ in on_disk.values()] for page in pages)

    # And in the bucket.
    router.read_until(lambda: router.count("EXTERNAL") >= 3 * NUM_PAGES)
    below = router.tokens["EXTERNAL"]
    assert {block: router.tokens["GPU"][block] for block in below} == below
    in_bucket = set(router.media["EXTERNAL"])

    # A flush empties the tree, and disk and bucket keep what they have.
    before, num_cleared = set(router.media["DISK"]), router.num_cleared  # once at start
    server.request("/flush_cache", {})
    router.read_until(lambda: router.num_cleared > num_cleared)
    router.read_until(lambda: router.media.get("DISK", set()) >= before)
    router.read_until(lambda: router.media.get("EXTERNAL", set()) >= in_bucket)
    assert router.count("GPU") == router.count("CPU_PINNED") == 0
    again = server.generate(prompts[0])
    assert again.output_ids == answers[0].output_ids
    assert again.cached["storage"] == aligned(LENGTH)

    # A purge takes the tenant's pages, and only those.
    # (The last page ends with tokens of the answer, and may be told of late.)
    starts = [prompts[2][at : at + 8] for at in range(0, LENGTH, PAGE)]
    purged = {block for block, (tokens, _) in on_disk.items() if tokens[:8] in starts}
    assert len(purged) >= NUM_PAGES
    server.request("/tier/purge", TENANT)
    for medium, told in ("DISK", before), ("EXTERNAL", in_bucket):
        router.read_until(lambda m=medium: purged.isdisjoint(router.media.get(m, ())))
        router.read_until(lambda m=medium, k=told - purged: router.media.get(m, set()) >= k)
        assert purged.isdisjoint(router.media[medium])
    server.kill()
