"""The arguments that name a trace, and how commands load it: progress, bad rows, order."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sglang_tiered.tools.terminal import note, printable
from sglang_tiered_lab.trace.forms import Format
from sglang_tiered_lab.trace.source import DATA_VARIABLE, find
from sglang_tiered_lab.trace.tally import MOST_DROPPED, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_tiered_lab.trace.request import TraceRequest
    from sglang_tiered_lab.trace.text import Tokens


Progress: TypeAlias = "Callable[[int], None]"

_MIN_BAR_BYTES = 16 << 20  # smaller files are read before a bar is drawn


def layout(parser: argparse.ArgumentParser, description: str, examples: str) -> None:
    """The text of ``COMMAND --help``, as it is written."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = description
    parser.epilog = f"examples:\n{examples}"


def add_input_arguments(parser: argparse.ArgumentParser, block_tokens: str | None) -> None:
    """The flags that ``Input.of`` takes. ``block_tokens`` is the help of --block-tokens, where the
    command has it."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        nargs="?",
        help=f"a trace file, as it is or below ${DATA_VARIABLE}; or a folder with one trace in it "
        f"(default: ${DATA_VARIABLE})",
    )
    parser.add_argument(
        "--format",
        choices=[known.value for known in Format],
        help="what the file is (default: told from its content)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="stop at the first bad row (default: drop it, and say how many were dropped, and why)",
    )
    parser.add_argument(
        "--allow-dropped",
        action="store_true",
        help=f"use the file although more than {MOST_DROPPED:.0%}% of its rows were dropped",
    )
    parser.add_argument("--limit", metavar="N", type=positive, help="only the first N requests")
    if block_tokens is not None:
        parser.add_argument("--block-tokens", metavar="N", type=positive, help=block_tokens)
    parser.add_argument(
        "--trace-block-tokens",
        metavar="N",
        type=positive,
        help="tokens in a block of the file's hash_ids, where it does not say (default: inferred "
        "from its lengths)",
    )
    text = parser.add_argument_group("text (conversations only)")
    text.add_argument(
        "--bytes-per-token",
        metavar="N",
        type=positive,
        default=4,
        help="UTF-8 bytes a token is taken to be (default: %(default)s)",
    )
    text.add_argument(
        "--tokenizer",
        metavar="PATH",
        type=Path,
        help="count with this tokenizer.json, or the one in this folder, instead",
    )


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        type=Path,
        required=True,
        help="where to; a file that does not exist yet, or - for standard output",
    )


class Input:
    """A trace file, and how it is to be read. Raises ``TieredError`` for one that cannot be read.

    What was dropped, assumed or changed is said on stderr, once.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        format: Format | None = None,
        strict: bool = False,
        allow_dropped: bool = False,
        limit: int | None = None,
        trace_block_tokens: int | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self.path = find(path)
        self.tally = Tally()  # of the last reading
        self._format = format
        self._strict = strict
        self._allow_dropped = allow_dropped
        self._limit = limit
        self._trace_block_tokens = trace_block_tokens
        self._tokens = tokens
        self._said: set[str] = set()

    @classmethod
    def of(cls, options: argparse.Namespace) -> Input:
        """The one that a command line names."""
        from sglang_tiered_lab.trace.mooncake import BLOCK_TOKENS
        from sglang_tiered_lab.trace.text import Tokens, load_tokenizer

        block_tokens = getattr(options, "block_tokens", None) or BLOCK_TOKENS
        if options.tokenizer is not None:
            tokens = load_tokenizer(options.tokenizer, block_tokens)
        else:
            tokens = Tokens(block_tokens, options.bytes_per_token)
        return cls(
            options.trace,
            format=Format(options.format) if options.format else None,
            strict=options.strict,
            allow_dropped=options.allow_dropped,
            limit=options.limit,
            trace_block_tokens=options.trace_block_tokens,
            tokens=tokens,
        )

    def stream(self) -> Iterator[TraceRequest]:
        """The requests as they lie in the file. May be called again."""
        from sglang_tiered_lab.trace.reader import read_trace

        self.tally = Tally(strict=self._strict, allow_dropped=self._allow_dropped)
        with bar(f"reading {self.path.name}", self.path.stat().st_size) as advance:
            requests = read_trace(
                self.path,
                format=self._format,
                tally=self.tally,
                tokens=self._tokens,
                block_tokens=self._trace_block_tokens,
                on_bytes=advance,
            )
            yield from itertools.islice(requests, self._limit)
        self.tally.check()  # of what was read, where the limit ended it

    def load(self) -> list[TraceRequest]:
        """All requests in order of arrival; says what was dropped. Empty when nothing is usable."""
        requests = list(self.stream())
        self.report()
        return self._in_order(requests)

    def stream_timed(self, *, seed: int = 0) -> Iterator[TraceRequest]:
        """As ``stream``; requests of a file without times get some, and with them an order."""
        from sglang_tiered_lab.trace.arrivals import with_times

        def note_times() -> None:
            self._say("the trace has no times; conversations begin once a second on average.")

        return with_times(self.stream(), conversations_per_s=1.0, seed=seed, on_none=note_times)

    def load_timed(self, *, seed: int = 0) -> list[TraceRequest]:
        """As ``load``; requests of a file without times get some."""
        requests = list(self.stream_timed(seed=seed))
        self.report()
        return self._in_order(requests)

    def _in_order(self, requests: list[TraceRequest]) -> list[TraceRequest]:
        times = [request.arrival_s for request in requests]
        if any(
            before is not None and after is not None and after < before
            for before, after in itertools.pairwise(times)
        ):
            self._say("the file is not in order of arrival; its requests were sorted.")
            requests.sort(key=lambda request: request.arrival_s or 0.0)
        return requests

    def report(self) -> None:
        """Say what was not used, and when nothing was."""
        for sentence in self.tally.notes:
            self._say(sentence)
        if (summary := self.tally.summary()) is not None:
            self._say(summary)
        if not self.tally.num_requests:
            self._say(f"{self.path} has no request that can be used; check it, or give --format.")

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            note(sentence)


@contextlib.contextmanager
def bar(what: str, total: int, least: int = _MIN_BAR_BYTES) -> Iterator[Progress]:
    """Shows on a terminal how far a long piece of work is. Yields what is told."""
    if total < least or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(printable(what), total=total)
        yield lambda done: shown.update(task, completed=done)


def positive(text: str) -> int:
    """A whole number from 1."""
    return number(text, 1)


def number(text: str, least: int = 0) -> int:
    """A whole number, with k or M for thousands or millions."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kM]?)", text)
    exact = Decimal(match[1]) * {"": 1, "k": 1000, "M": 1_000_000}[match[2]] if match else None
    value = -1 if exact is None or exact % 1 else int(exact)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
    return value


def real(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
