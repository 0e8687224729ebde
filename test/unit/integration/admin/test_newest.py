"""The newest lines of requests, as ``GET /tier/requests`` tells them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kit.openapi import check_answer
from sglang_tiered.integration.admin.newest import TAIL_BYTES, newest_requests
from sglang_tiered.request_log import RequestLogConfig, older
from sglang_tiered.request_record import VERSION, RequestRecord, Sources

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
