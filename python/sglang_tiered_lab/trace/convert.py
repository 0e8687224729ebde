"""``convert``: any trace to Mooncake JSON lines, all of it or a slice."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError
from sglang_tiered.tools.terminal import note
from sglang_tiered_lab.trace.inputs import (
    Input,
    add_input_arguments,
    add_output_argument,
    layout,
    number,
    positive,
    real,
)
from sglang_tiered_lab.trace.writing import check_free

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from sglang_tiered_lab.trace.request import TraceRequest


_DESCRIPTION = """\
Writes a trace as Mooncake JSON lines. Block ids are numbered anew, from 0 in order of
appearance; conversations and turns stay where they are known (conversation, turn), and
blocks of other than 512 tokens are named (block_size).

A file of conversations gets times: conversations begin as a Poisson process, turns follow after
lognormal gaps (median 126 s, sigma 1.05). Its slices are taken afterwards.
"""
_EXAMPLES = """\
  sglang-tiered trace convert ShareGPT_V3.json -o sharegpt.jsonl --rate 2
  sglang-tiered trace convert conversation.jsonl --block-tokens 64 -o small-blocks.jsonl
  sglang-tiered trace convert trace.jsonl --from-s 600 --to-s 1200 -o ten-minutes.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layout(parser, _DESCRIPTION, _EXAMPLES)
    add_input_arguments(
        parser,
        "tokens in a block of what is written; a multiple or a divisor of the trace's own "
        "(default: the trace's own, 512 where it has none)",
    )
    add_output_argument(parser)
    times = parser.add_argument_group("times (where the file has none)")
    times.add_argument(
        "--rate",
        metavar="R",
        type=real,
        default=1.0,
        help="conversations begun in a second (default: %(default)s)",
    )
    times.add_argument(
        "--gap-s",
        metavar="S",
        type=real,
        default=126.0,
        help="median time between two turns (default: %(default)s)",
    )
    times.add_argument("--seed", metavar="N", type=number, default=0, help="of the times")
    cut = parser.add_argument_group("slices")
    cut.add_argument("--from-s", metavar="S", type=_time, help="from this time of the trace")
    cut.add_argument("--to-s", metavar="S", type=_time, help="up to, and without, this time")
    cut.add_argument("--skip", metavar="N", type=number, default=0, help="leave out the first N")
    cut.add_argument("--count", metavar="N", type=positive, help="at most N requests")


def _time(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else real(text)


def run(options: argparse.Namespace) -> int:
    from sglang_tiered_lab.trace.arrivals import with_times
    from sglang_tiered_lab.trace.blocks import with_block_tokens
    from sglang_tiered_lab.trace.writing import write_mooncake

    if None not in (options.from_s, options.to_s) and options.from_s >= options.to_s:
        raise ConfigError("--from-s must be below --to-s; nothing lies between them.")
    check_free(options.output)
    source = Input.of(options)
    timed = with_times(
        source.stream(),
        conversations_per_s=options.rate,
        gap_median_s=options.gap_s,
        seed=options.seed,
    )
    requests = _cut(timed, options)
    first = next(requests, None)
    if first is None:
        source.report()
        if source.tally.num_requests:
            note("no request lies in the slice; give a wider one.")
        return 1
    count = write_mooncake(
        with_block_tokens(itertools.chain([first], requests), options.block_tokens), options.output
    )
    source.report()
    note(f"{count:,} requests written to {options.output}.")
    return 0


def _cut(requests: Iterable[TraceRequest], options: argparse.Namespace) -> Iterator[TraceRequest]:
    since, until = options.from_s or 0.0, options.to_s
    within = (
        request
        for request in requests
        if (request.arrival_s or 0.0) >= since
        and (until is None or (request.arrival_s or 0.0) < until)
    )
    stop = None if options.count is None else options.skip + options.count
    return itertools.islice(within, options.skip, stop)
