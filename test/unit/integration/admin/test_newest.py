"""The newest lines of requests, as ``GET /tier/requests`` tells them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kit.openapi import check_answer
from sglang_tiered.api import CallError
from sglang_tiered.integration.admin.http_api import TAIL_BYTES, newest_requests
from sglang_tiered.request_log import VERSION, RequestLogConfig, RequestRecord, Sources, older

NOW = 1_000_000.0


def line(number: int, ended_at: float) -> bytes:
    record = RequestRecord(
        v=VERSION,
        rid=f"r{number}",
        arrived_unix_s=ended_at - 1,
        end="stop",
        num_prompt_tokens=10,
        total_s=1.0,
        tokens=Sources(num_host=4, num_computed=6),
    )
    return msgspec.json.encode(record) + b"\n"


def test_minute_leaves_older_requests_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    older(path).write_bytes(line(0, NOW - 61))
    path.write_bytes(line(1, NOW - 59) + b'{"v":99}\n' + b"{half\n" + line(2, NOW - 1))
    answer = newest_requests(RequestLogConfig(path=str(path)), 2, now=NOW)
    assert [each.rid for each in answer.requests] == ["r2", "r1"]
    check_answer("GET", "/tier/requests", 200, msgspec.json.decode(msgspec.json.encode(answer)))
    minute = answer.minute
    assert (minute.num_requests, minute.num_host, minute.num_computed) == (2, 8, 12)
    assert minute.is_whole
    assert len(newest_requests(RequestLogConfig(path=str(path)), 9, now=NOW).requests) == 3


def test_minute_beyond_what_is_read_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    num_lines = TAIL_BYTES // len(line(10_000, NOW)) + 100
    path.write_bytes(b"".join(line(10_000 + n, NOW) for n in range(num_lines)))
    minute = newest_requests(RequestLogConfig(path=str(path)), 1, now=NOW).minute
    assert not minute.is_whole and 0 < minute.num_requests < num_lines


def test_many_replicas_read_no_more_than_one(tmp_path: Path) -> None:
    config = RequestLogConfig(path=str(tmp_path / "log"), num_replicas=8)
    text = b"".join(line(10_000 + n, NOW) for n in range(TAIL_BYTES // len(line(10_000, NOW))))
    for replica in range(8):
        config.file_of(replica).write_bytes(text)
    minute = newest_requests(config, 1, now=NOW).minute
    assert len(text) / len(line(10_000, NOW)) * 0.9 < minute.num_requests <= len(text)
    assert minute.num_requests * len(line(10_000, NOW)) <= TAIL_BYTES


def test_rename_while_reading_tells_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(line(1, NOW))
    older(path).hardlink_to(path)  # as the reader sees it, between two opens
    assert len(newest_requests(RequestLogConfig(path=str(path)), 9, now=NOW).requests) == 1


def test_server_without_lines_says_how_to_start() -> None:
    with pytest.raises(CallError, match="--tier-log-requests FILE") as caught:
        newest_requests(None, 1)
    assert caught.value.status == 404
