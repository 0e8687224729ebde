"""A fleet's traffic is a trace that our own reader takes, and says nothing of any text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from kit.clock import Clock
from sglang_tiered.route.prompt import Prompt, page_keys
from sglang_tiered.route.record import BLOCK_TOKENS, MAX_WAITING, Recorder
from sglang_tiered_lab.trace.reader import read_trace

DEADLINE_S = 20.0


def prompt_of(length: int, first: int = 0, tenant: str | None = None) -> Prompt:
    ids = array("I", range(first, first + length))
    return Prompt(length, ids, extra_key=tenant, max_new=7)


def written(recorder: Recorder, clock: Clock, prompts: Sequence[Prompt], path: Path) -> list[bytes]:
    async def run() -> list[bytes]:
        work = asyncio.create_task(recorder.run())
        for prompt in prompts:
            clock.now += 1.5
            recorder.note(prompt)
        deadline = time.monotonic() + DEADLINE_S
        while len(lines := lines_of(path)) < len(prompts):
            assert time.monotonic() < deadline and not work.done()
            await asyncio.sleep(0.005)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return lines

    return asyncio.run(run())


def lines_of(path: Path) -> list[bytes]:
    found: list[bytes] = []
    for one in (path.with_name(path.name + ".1"), path):
        with contextlib.suppress(FileNotFoundError):  # it may be renamed just now
            found += one.read_bytes().splitlines()
    return found


def test_our_reader_takes_what_was_recorded(tmp_path: Path) -> None:
    path, clock = tmp_path / "trace.jsonl", Clock(50.0)
    recorder = Recorder(path, clock=clock)
    prompts = [prompt_of(1300), prompt_of(1300), prompt_of(512, 9), prompt_of(3)]
    prompts.append(prompt_of(1300, tenant="a"))
    rows = [json.loads(line) for line in written(recorder, clock, prompts, path)]
    assert [row["timestamp"] for row in rows] == [1500, 3000, 4500, 6000, 7500]
    assert rows[0]["hash_ids"] == rows[1]["hash_ids"] != rows[4]["hash_ids"]
    assert len(rows[0]["hash_ids"]) == 2 and rows[3]["hash_ids"] == []
    plain = page_keys(prompts[0].ids or array("I"), BLOCK_TOKENS)
    assert not set(plain) & set(rows[0]["hash_ids"]), "names are under a secret"
    assert path.stat().st_mode & 0o777 == 0o600
    read = list(read_trace(path))
    assert [one.input_length for one in read] == [1300, 1300, 512, 3, 1300]
    assert {one.output_length for one in read} == {7}
    assert read[0].block_ids[:2] == read[1].block_ids[:2]


def test_full_file_makes_room_for_another(tmp_path: Path) -> None:
    path, clock = tmp_path / "trace.jsonl", Clock()
    recorder = Recorder(path, max_bytes=100, clock=clock)
    prompts = [prompt_of(5)] * 3
    assert len(written(recorder, clock, prompts, path)) == 3, "two fill a file"
    assert path.with_name("trace.jsonl.1").stat().st_size >= 100


def test_what_comes_too_fast_is_dropped(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace.jsonl")
    recorder.note(Prompt(5))
    for _ in range(MAX_WAITING + 3):
        recorder.note(prompt_of(1))
    assert recorder._waiting.qsize() == MAX_WAITING
