"""Azure LLM inference traces: CSV with ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``.

Patel et al., "Splitwise" (ISCA 2024), and Stojkovic et al., "DynamoLLM" (HPCA 2025). Nothing is
known of prompts but their length, so no two of them share a block. Times count from the first row.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from sglang_tiered_lab.trace.request import TraceRequest, num_blocks_for
from sglang_tiered_lab.trace.tally import BadRowError

if TYPE_CHECKING:
    from sglang_tiered_lab.trace.rows import Row


_MAX_TOKENS = 1 << 24  # a prompt takes memory for each of its blocks


class TableReader:
    """Reads the rows of one file, in their order; ``header`` is its first line."""

    note = (
        "an Azure trace says nothing of prompts but their length, so none of them shares a prefix."
    )

    def __init__(self, header: bytes, block_tokens: int) -> None:
        names = [name.lower() for name in _cells(header)]
        self._block_tokens = block_tokens
        self._places = {name: place for place, name in enumerate(names)}
        self._next_id = 0
        self._zero: datetime.datetime | None = None

    def decode(self, row: Row) -> TraceRequest:
        """The request of a row. Raises ``BadRowError``."""
        cells = _cells(row.data)
        length = self._tokens(cells, "ContextTokens")
        time = self._time(cells)
        self._zero = self._zero or time
        first = self._next_id
        self._next_id += num_blocks_for(length, self._block_tokens)
        return TraceRequest(
            arrival_s=(time - self._zero).total_seconds(),
            input_length=length,
            output_length=self._tokens(cells, "GeneratedTokens"),
            block_ids=tuple(range(first, self._next_id)),
            block_tokens=self._block_tokens,
        )

    def _cell(self, cells: list[str], name: str) -> str:
        place = self._places.get(name.lower())
        if place is None or place >= len(cells):
            raise BadRowError(f"it has no {name}")
        return cells[place]

    def _tokens(self, cells: list[str], name: str) -> int:
        text = self._cell(cells, name)
        digits = text.removesuffix(".0")
        if not digits.isascii() or not digits.isdigit() or len(digits) > 9:
            raise BadRowError(f"its {name} is not a number of tokens", ascii(text[:20]))
        if int(digits) > _MAX_TOKENS:
            raise BadRowError(f"its {name} is more than {_MAX_TOKENS:,}", digits)
        return int(digits)

    def _time(self, cells: list[str]) -> datetime.datetime:
        text = self._cell(cells, "TIMESTAMP")
        try:
            time = datetime.datetime.fromisoformat(text)
        except ValueError as error:
            raise BadRowError("its TIMESTAMP is not a time", ascii(text[:30])) from error
        return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)


def _cells(line: bytes) -> list[str]:
    return [cell.strip(' "') for cell in line.decode("utf-8", "replace").strip().split(",")]
