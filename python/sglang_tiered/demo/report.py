"""What the demo shows: live progress on a terminal, one line a phase anywhere else. Then one table,
one JSON document, and whether that is what the plan expected."""

from __future__ import annotations

import contextlib
import datetime
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_tiered.demo.plan import DEVICE, FIRST, HOST, KILLED, NVME
from sglang_tiered.demo.questions import TIERS, TimedAnswer
from sglang_tiered.tools.machine import describe_machine, describe_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from sglang_tiered.demo.plan import DemoPlan

__all__ = ["STYLES", "Phases", "Row", "Step", "document", "make_table", "one_line", "verdict"]

EXPECTED = {FIRST: "computed", DEVICE: "device", HOST: "host", NVME: "nvme", KILLED: "nvme"}
_HEADS = {"nvme": "NVMe"}
STYLES = {"device": "green", "host": "cyan", "nvme": "magenta", "computed": "yellow"}
_HEARD = 30  # columns


def one_line(text: str) -> str:
    """What a server said, as a terminal may show it: another's server may say anything."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


class Step(NamedTuple):
    """``done`` is to be called after each step, ``hear`` with what an answer says so far."""

    done: Callable[[], None]
    hear: Callable[[str], None]


class Phases:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn("line", finished_text="[green]*[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[count]}", justify="right"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[heard]}"),
            console=console,
            refresh_per_second=4,  # drawing takes time from what is timed
            disable=not console.is_terminal or console.is_dumb_terminal,
        )

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield

    @contextlib.contextmanager
    def phase(self, title: str, total: int | None = None) -> Iterator[Step]:
        """Gives what is to be called after each of ``total`` steps."""
        if self._progress.disable:
            self._console.print(title, highlight=False)
            yield Step(lambda: None, lambda text: None)
            return
        progress, done = self._progress, 0
        count = "" if total is None else f"0/{total}"
        task = progress.add_task(title, total=total, count=count, heard="")

        def step() -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, count=f"{done}/{total}")

        def hear(text: str) -> None:
            progress.update(task, heard=escape(one_line(text)[-_HEARD:] + " "), refresh=True)

        yield Step(step, hear)
        progress.update(task, total=max(done, 1), completed=max(done, 1), heard="")

    def say(self, line: str) -> None:
        """A line that stays, above what moves."""
        self._console.print(line, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Row:
    """Prompts that should all have come from one place, by their numbers."""

    source: str
    answers: dict[int, TimedAnswer]

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


def make_table(rows: list[Row], plan: DemoPlan) -> Table:
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
