"""What was measured: one table, one JSON document, and whether it is what the plan expected."""

from __future__ import annotations

import datetime
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from sglang_tiered.demo.plan import DEVICE, FIRST, HOST, KILLED, NVME
from sglang_tiered.demo.questions import TIERS, Answer
from sglang_tiered.tools.machine import describe_machine, describe_versions

if TYPE_CHECKING:
    from sglang_tiered.demo.plan import Plan

__all__ = ["STYLES", "Row", "document", "make_table", "verdict"]

EXPECTED = {FIRST: "computed", DEVICE: "device", HOST: "host", NVME: "nvme", KILLED: "nvme"}
_HEADS = {"nvme": "NVMe"}
STYLES = {"device": "green", "host": "cyan", "nvme": "magenta", "computed": "yellow"}


@dataclass(frozen=True)
class Row:
    """Prompts that should all have come from one place, by their numbers."""

    source: str
    answers: dict[int, Answer]

    @property
    def ttft_s(self) -> dict[str, float]:
        seconds = [answer.ttft_s for answer in self.answers.values()]
        return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}

    @property
    def tokens(self) -> dict[str, int]:
        return {
            tier: sum(answer.tokens[tier] for answer in self.answers.values()) for tier in TIERS
        }

    @property
    def is_as_expected(self) -> bool:
        tokens = self.tokens
        return tokens[EXPECTED[self.source]] > sum(tokens.values()) / 2


def answers_equal(rows: list[Row]) -> bool:
    first = rows[0].answers
    return all(
        answer.output_ids == first[number].output_ids
        for row in rows
        for number, answer in row.answers.items()
    )


def verdict(rows: list[Row]) -> str | None:
    """What is not as it should be, in one sentence; nothing if all is well."""
    if not answers_equal(rows):
        return "every answer was expected to be the same as the first time, but some differ"
    for row in rows:
        if not row.is_as_expected:
            tier = EXPECTED[row.source]
            tokens = row.tokens
            return (
                f"most tokens of the row {row.source!r} were expected "
                f"{'to be computed' if tier == 'computed' else f'from {tier}'}, but "
                f"{tokens[tier]:,} of {sum(tokens.values()):,} were"
            )
    return None


def make_table(rows: list[Row], plan: Plan) -> Table:
    """At most 80 columns wide."""
    table = Table(
        box=box.HORIZONTALS,
        padding=(0, 1),
        collapse_padding=True,
        title=f"{plan.num_prompts} prompts of {plan.prompt_tokens:,} tokens, one at a time",
        caption="TTFT: time to the first token, median and range.\n"
        "Right of it: prompt tokens by where they came from.",
        header_style="bold",
        title_style="bold",
        caption_style="dim",
    )
    table.add_column("asked", no_wrap=True)
    table.add_column("TTFT", justify="right", no_wrap=True)
    table.add_column("ms", justify="left", no_wrap=True, style="dim")
    for tier in TIERS:
        table.add_column(_HEADS.get(tier, tier), justify="right", no_wrap=True, style=STYLES[tier])
    table.add_column("faster", justify="right", no_wrap=True, style="bold")
    by_source = {row.source: row for row in rows}
    for source in EXPECTED:
        if source in by_source:
            row = by_source[source]
            faster = rows[0].ttft_s["median"] / row.ttft_s["median"]
            table.add_row(*_cells(row), "" if source == FIRST else f"{faster:.1f}x")
        elif source in plan.missing:
            table.add_row(_LABELS[source], "", "not asked")
    return table


def _cells(row: Row) -> list[str]:
    times = {name: f"{seconds * 1e3:.0f}" for name, seconds in row.ttft_s.items()}
    tokens = [_short(number) for number in row.tokens.values()]
    return [_LABELS[row.source], times["median"], f"{times['min']}-{times['max']}", *tokens]


def _short(number: int) -> str:
    if number == 0:
        return "-"
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:.2f}M"


_LABELS = {
    FIRST: "first time",
    DEVICE: "from device",
    HOST: "from host",
    NVME: "from NVMe",
    KILLED: "after kill -9",
}


def document(rows: list[Row], settings: dict[str, Any], *, is_here: bool) -> dict[str, Any]:
    """``is_here``: whether the server ran on this machine, whose description that is."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine() if is_here else {},
        "settings": {**settings, "versions": describe_versions() if is_here else {}},
        "rows": [
            {
                "from": row.source,
                "num_prompts": len(row.answers),
                "ttft_s": row.ttft_s,
                "tokens": row.tokens,
            }
            for row in rows
        ],
        "answers_equal": answers_equal(rows),
    }
