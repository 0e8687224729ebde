"""Traces as the serving benchmark asks them, and its limit on a disk."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from kit.talks import make_request
from serving_bench import client
from serving_bench.client import Request
from serving_bench.replays import in_turns, load_mooncake, load_sharegpt, trace_requests
from serving_bench.throttle import NoThrottleError, ReadThrottle, disk_of
from sglang_tiered_lab.trace.request import TraceRequest
from sglang_tiered_lab.trace.source import TraceError


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


def test_generated_conversations_grow_turn_by_turn_and_fit() -> None:
    (trace,) = load_sharegpt(tokens_max=2048, num_requests=40, num_passes=1)
    assert 30 <= len(trace) < 80
    assert max(one.context_length for one in trace) <= 2048
    later = [one for one in trace if (one.turn or 0) > 1]
    assert later, "no conversation returns"
    asked = trace_requests("s", trace, duration_s=0.0, num_output=4)
    assert sum(one.num_reusable for one in asked) > 0


def sharegpt_file(path: Path, num_conversations: int) -> Path:
    """As it is downloaded: one array, ids that come again, and rows that hold nothing."""
    said = [
        {
            "id": f"c{number % 7}_{number}",
            "conversations": [
                {"from": speaker, "value": f"{number} {place} " + "word " * 60}
                for place, speaker in enumerate(["human", "gpt"] * 3)
            ],
        }
        for number in range(num_conversations)
    ]
    path.write_text(json.dumps([*said[:3], {"id": "empty", "conversations": []}, *said[3:]]))
    return path


def test_downloaded_sharegpt_file_is_asked_in_passes(tmp_path: Path) -> None:
    path = sharegpt_file(tmp_path / "ShareGPT.json", 40)
    first, second = load_sharegpt(2048, num_requests=20, num_passes=2, path=path)
    names = [{request.conversation for request in one} for one in (first, second)]
    assert not names[0] & names[1]
    asked = trace_requests("s", second, duration_s=0.0, num_output=4)
    assert sum(one.num_reusable for one in asked) > 0


def test_benchmark_files_may_have_any_form(tmp_path: Path) -> None:
    messages, blocks, sessions = (tmp_path / name for name in ("messages", "blocks", "sessions"))
    turns = [{"role": role, "content": "word " * 60} for role in ["user", "assistant"] * 3]
    messages.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(20)))
    lines = [
        {
            "timestamp": 1000 * second,
            "input_length": 160.0,
            "output_length": 20,
            "hash_ids": [f"{second % 10}-{place}" for place in range(10)],
        }
        for second in range(60)
    ]
    blocks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for number, line in enumerate(lines):
        line["session_id"] = f"s{number // 3}"
        if number % 3:
            del line["timestamp"]
            line["delay"] = 2500
    sessions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in (messages, blocks, sessions):
        (trace,) = load_sharegpt(2048, num_requests=40, num_passes=1, path=path)
        drawn = load_mooncake(path, 2048, num_requests=40)
        for found in (trace, drawn):
            asked = trace_requests("t", found, duration_s=9.0, num_output=4)
            assert len(asked) >= 30
            assert sum(one.num_reusable for one in asked) > 0
            assert any(one.after_s for one in asked) == (path == sessions)


def test_sharegpt_file_with_too_little_is_refused(tmp_path: Path) -> None:
    path = sharegpt_file(tmp_path / "ShareGPT.json", 10)
    with pytest.raises(TraceError, match="1 passes of 20 requests .* and 5 are needed; use"):
        load_sharegpt(2048, num_requests=20, num_passes=5, path=path)


def test_conversations_take_turns_and_none_overtakes_itself() -> None:
    (trace,) = load_sharegpt(tokens_max=2048, num_requests=40, num_passes=1)
    asked = trace_requests("s", trace, duration_s=0.0, num_output=4)
    ordered, number = in_turns(trace, asked)
    assert sorted(one.label for one in ordered) == sorted(one.label for one in asked)
    conversation = {one.label: entry.conversation for one, entry in zip(asked, trace, strict=True)}
    assert number == len(set(conversation.values()))
    # The first turns of all come before any second turn, and each conversation keeps its order.
    assert len({conversation[one.label] for one in ordered[:number]}) == number
    for name in set(conversation.values()):
        own = [one.label for one in asked if conversation[one.label] == name]
        assert [one.label for one in ordered if conversation[one.label] == name] == own


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


def test_a_turn_leaves_time_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[str, float] = {}

    async def answer(url: str, request: Request) -> str:
        times[request.label] = asyncio.get_running_loop().time()
        return request.label

    monkeypatch.setattr(client, "ask", answer)
    asked = [
        Request("a1", (1,), 1, conversation="a"),
        Request("a2", (1,), 1, conversation="a", after_s=0.05),
    ]
    client.ask_timed("url", asked)
    # The loop ends a sleep up to its clock's resolution before its time.
    assert times["a2"] - times["a1"] >= 0.05 - 1e-6


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


def test_a_partitions_limit_is_for_its_disk(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    partition = tmp_path / "disk" / "disk1"
    partition.mkdir(parents=True)
    (tmp_path / "disk" / "dev").write_text("8:0\n")
    (partition / "dev").write_text("8:1\n")
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / name).symlink_to(partition)
    assert disk_of(tmp_path, tmp_path / "sys") == "8:1"
    (partition / "partition").write_text("1\n")
    assert disk_of(tmp_path, tmp_path / "sys") == "8:0"


def test_a_folder_on_no_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoThrottleError, match="no block device"):
        disk_of(tmp_path, tmp_path / "sys")
