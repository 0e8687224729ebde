"""``newest_requests``: the end of the files of ``--tier-log-requests``, for ``GET /tier/requests``.

They are read in the process that serves HTTP, when it is asked: no scheduler takes part, and
nothing is kept while nobody asks.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.api import CallError, LastMinute, LoggedRequest, NewestRequests
from sglang_tiered.request_log import older
from sglang_tiered.request_record import VERSION, RequestRecord, Sources
from sglang_tiered.tools.explain.causes import cause

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_tiered.request_log import RequestLogConfig

__all__ = ["MINUTE_S", "TAIL_BYTES", "newest_requests"]

MINUTE_S = 60.0

TAIL_BYTES = 1 << 20
"""What is read of all replicas' lines: about 1,700 of them, in some forty milliseconds."""

NOT_LOGGED = (
    "this server writes no line of its requests; start it with --tier-log-requests FILE to see them"
)


def newest_requests(
    config: RequestLogConfig | None, limit: int, *, now: float | None = None
) -> NewestRequests:
    """Return the last ``limit`` requests, the newest first, and the minute before ``now`` (Unix
    time). Reads at most ``TAIL_BYTES``. Raises ``CallError`` (404) where no lines are written."""
    if config is None:
        raise CallError(NOT_LOGGED, 404)
    since = (time.time() if now is None else now) - MINUTE_S
    records: list[RequestRecord] = []
    is_whole = True
    for replica in range(config.num_replicas):
        found, has_more = _tail(config.file_of(replica), TAIL_BYTES // config.num_replicas)
        records += found
        is_whole &= not has_more or any(_ended_at(record) < since for record in found)
    records.sort(key=_ended_at, reverse=True)
    minute = [record for record in records if _ended_at(record) >= since]
    sums = {
        name: sum(getattr(record.tokens, name) for record in minute)
        for name in Sources.__struct_fields__
    }
    return NewestRequests(
        tuple(
            LoggedRequest(**msgspec.structs.asdict(record), why=cause(record))
            for record in records[:limit]
        ),
        LastMinute(**sums, num_requests=len(minute), is_whole=is_whole),
    )


def _ended_at(record: RequestRecord) -> float:
    return record.arrived_unix_s + record.total_s


def _tail(path: Path, num_bytes: int) -> tuple[list[RequestRecord], bool]:
    """Return the records at the end of a replica's files, and whether there are earlier ones."""
    data, has_more, newest = b"", False, None
    for file in (path, older(path)):
        with contextlib.suppress(OSError), file.open("rb") as opened:
            found = os.fstat(opened.fileno())
            if newest == (found.st_dev, found.st_ino):  # renamed since it was read
                break
            newest = found.st_dev, found.st_ino
            start = max(0, found.st_size - (num_bytes - len(data)))
            opened.seek(start)
            part = opened.read(num_bytes - len(data))
            if start:
                has_more = True
                part = part.partition(b"\n")[2]  # no half line
            data = part + data
        if has_more:
            break
    records = []
    for line in data.splitlines():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            record = msgspec.json.decode(line, type=RequestRecord)
            if record.v == VERSION:
                records.append(record)
    return records, has_more
