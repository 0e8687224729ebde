"""Traces as the serving benchmark asks them, and its limit on a disk."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kit.talks import make_request
from serving_bench import client
from serving_bench.client import Request
from serving_bench.replays import trace_requests
from serving_bench.throttle import ReadThrottle
from sglang_tiered_lab.trace.request import TraceRequest


def request(at_s: float, blocks: tuple[int, ...], output: int = 9) -> TraceRequest:
    return make_request(blocks, block_tokens=64, arrival_s=at_s, output_length=output)


def test_a_trace_keeps_its_spacing_and_its_reuse() -> None:
    trace = [request(10.0, (1, 2)), request(12.0, (1, 3)), request(30.0, (1, 2, 4), output=2)]
    asked = trace_requests("t", trace, duration_s=10.0, num_output=4)
    assert [one.at_s for one in asked] == pytest.approx([0.0, 1.0, 10.0])
    assert [one.num_reusable for one in asked] == [0, 64, 128]
    assert [one.num_output for one in asked] == [4, 4, 2]
    first, second, third = (one.prompt for one in asked)
    assert first[:64] == second[:64]
    assert first[64:] != second[64:]
    assert third[:128] == first
    assert len({one.label for one in asked}) == 3


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_due_turn_waits_for_the_last_answer(
    monkeypatch: pytest.MonkeyPatch, is_timed: bool
) -> None:
    events: list[str] = []
    answered = asyncio.Event()

    async def answer(url: str, request: Request) -> str:
        events.append(f"sent {request.label}")
        if request.label == "a1":
            await answered.wait()  # until the stranger, due later, was served
        if request.label == "stranger":
            answered.set()
        events.append(f"answered {request.label}")
        return request.label

    monkeypatch.setattr(client, "ask", answer)
    asked = [
        Request("a1", (1,), 1, at_s=0.0, conversation="a"),
        Request("a2", (1,), 1, at_s=0.0, conversation="a"),
        Request("stranger", (1,), 1, at_s=0.01),
    ]
    found = client.ask_timed("url", asked) if is_timed else client.ask_each("url", asked, 2)
    assert found == ["a1", "a2", "stranger"]  # type: ignore[comparison-overlap]
    assert events.index("answered a1") < events.index("sent a2")
    assert events.index("sent stranger") < events.index("answered a1")


def fake_hierarchy(root: Path, version: int) -> ReadThrottle:
    (root / "home").mkdir(parents=True)
    (root / "proc" / "17").mkdir(parents=True)
    line = "0::/home" if version == 2 else "7:cpu:/other\n5:blkio:/home"
    (root / "proc" / "17" / "cgroup").write_text(f"{line}\n")
    return ReadThrottle(root, version, "8:0", root / "proc")


@pytest.mark.parametrize(
    ("version", "file", "text"),
    [(2, "io.max", "8:0 rbps=1000"), (1, "blkio.throttle.read_bps_device", "8:0 1000")],
)
def test_a_limited_process_returns_even_after_failure(
    tmp_path: Path, version: int, file: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    throttle = fake_hierarchy(tmp_path, version)
    group = tmp_path / f"bench-serving-{os.getpid()}"
    # A real control group's files go with it; these do not.
    removed: list[Path] = []
    monkeypatch.setattr(Path, "rmdir", lambda path: removed.append(path))  # noqa: PLW0108
    with pytest.raises(KeyboardInterrupt), throttle.limit([17], 1000):
        assert (group / file).read_text().strip() == text
        assert (group / "cgroup.procs").read_text() == "17\n"
        raise KeyboardInterrupt
    assert (tmp_path / "home" / "cgroup.procs").read_text() == "17\n"
    assert removed == [group]
