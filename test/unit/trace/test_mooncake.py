"""The Mooncake reader takes the published format and names the line that is not in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sglang_tiered.errors import TraceError
from sglang_tiered.trace.mooncake import Request, read

if TYPE_CHECKING:
    from pathlib import Path

GOOD = '{"timestamp": 7, "input_length": 513, "output_length": 2, "hash_ids": [4, 9]}\n'


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines))
    return path


def test_requests_keep_their_order_without_blank_lines(tmp_path: Path) -> None:
    second = GOOD.replace("7", "8", 1)
    requests = list(read(write(tmp_path, GOOD, "\n", second)))
    assert requests[0] == Request(7, 513, 2, (4, 9))
    assert [request.timestamp for request in requests] == [7, 8]


def test_unknown_field_is_ignored(tmp_path: Path) -> None:
    assert len(list(read(write(tmp_path, GOOD.replace("{", '{"type": "chat", ', 1))))) == 1


def test_last_line_may_lack_its_newline(tmp_path: Path) -> None:
    assert len(list(read(write(tmp_path, GOOD, GOOD.strip())))) == 2


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "\xff",
        GOOD.replace("513", "-1"),
        GOOD.replace("513", '"513"'),
        GOOD.replace("513", "1.5"),
        GOOD.replace(', "hash_ids": [4, 9]', ""),
        GOOD.replace("[4, 9]", "[4]"),  # 513 tokens are two blocks
        GOOD.replace("[4, 9]", "[4, null]"),
    ],
)
def test_bad_line_is_named_in_one_sentence(tmp_path: Path, line: str) -> None:
    requests = read(write(tmp_path, GOOD, "\n", line))
    assert next(requests).timestamp == 7
    with pytest.raises(TraceError, match=r"line 3 of .*trace\.jsonl is not a Mooncake") as caught:
        next(requests)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message


def test_empty_trace_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl is empty; expected .*Mooncake"):
        list(read(write(tmp_path)))
