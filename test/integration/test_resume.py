"""A server that dies takes the answer with it: through a front, killed as ``kill -9`` does."""

from __future__ import annotations

from pathlib import Path

import pytest
from route_front import Front

from conftest import SMALL, Launch, make_prompts
from server_process import Server
from sglang_tiered.client import Generated, TierClient

pytest.importorskip("envoy")
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE, EVERY = 64, 64
LENGTH, NUM_NEW, KILLED_AT = 700, 400, 200


def test_restarted_server_goes_on_from_its_disk(
    launch: Launch, stock: Server, tmp_path: Path
) -> None:
    flags = (*SMALL, "--tier-dir", str(tmp_path / "kv"), "--tier-checkpoint-tokens", str(EVERY))
    first = server = launch(*flags)
    (prompt,) = make_prompts(4700, 1, LENGTH)
    sampling = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
    pieces: list[Generated] = []
    front = Front.start(tmp_path, [server.url])
    try:
        front.wait_until_ready(1)
        with TierClient(f"http://127.0.0.1:{front.port}") as client:
            for piece in client.generate(prompt, sampling):
                pieces.append(piece)
                num_ids = sum(len(one.ids) for one in pieces)
                if num_ids >= KILLED_AT and server is first:
                    server.kill()
                    server = launch(*flags)
                    front.follow([server.url])
    finally:
        front.close()
    ids = [token for one in pieces for token in one.ids]
    assert ids == stock.generate(prompt, NUM_NEW).output_ids
    last = pieces[-1]
    assert last.num_resumed == 1 and last.is_exact
    assert last.num_computed_again <= EVERY + PAGE, last
    assert "Traceback" not in front.log, front.log
