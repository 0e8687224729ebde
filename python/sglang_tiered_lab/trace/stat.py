"""``stat``: what a trace is made of, and how it does on a cache of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import TraceError
from sglang_tiered.tools.terminal import print_lines, print_table
from sglang_tiered_lab.trace.inputs import Input, add_input_arguments, layout, positive
from sglang_tiered_lab.trace.writing import check_free, new_file

if TYPE_CHECKING:
    import argparse


_DESCRIPTION = """\
Requests, lengths, turns, and how a cache would do: the hit rate without bound, and
the hit rate of LRU by capacity. A hit is a leading block: the first block of a prompt
that is not cached ends it. The cache is one for all requests and holds whole blocks.

Conversations have no times: they follow one another, so the LRU curve is
that of conversations that never overlap. Give them times with convert first.

In --json, besides lengths and rates:
  ideal_hit_rate         hit blocks over all, when nothing is ever evicted;
                         ideal_token_hit_rate: by tokens
  mean_request_hit_rate  mean of the share of its tokens that a request hits then
  at_most_one_hit_share  requests that hit one block at most: often a system prompt
  lru, lru_curve         hit rates of an LRU cache by capacity in tokens
  num_unique_blocks      working_set_tokens: their tokens; seen_once_share: of them
                         those touched once
  top_reuse_share        of all touches after the first, those of the most reused
                         1, 5, 10 and 20% of blocks
  reuse_distance_blocks  different blocks between two touches of a block;
                         reuse_gap_s: seconds
  turns                  share of requests by turn; where no conversations are
                         named, inferred by three shared leading blocks
"""
_EXAMPLES = """\
  sglang-tiered trace stat mooncake/conversation.jsonl
  sglang-tiered trace stat trace.jsonl --capacity 1.5M --json stat.json --plot lru.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layout(parser, _DESCRIPTION, _EXAMPLES)
    add_input_arguments(
        parser,
        "tokens in a block of the figures; a multiple or a divisor of the trace's own (default: "
        "the trace's own, 512 where it has none)",
    )
    parser.add_argument(
        "--capacity",
        metavar="TOKENS",
        type=positive,
        action="append",
        default=[],
        help="a further cache size for the curve, rounded down to whole blocks; repeatable",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures; - prints")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the hit-rate curve")


def run(options: argparse.Namespace) -> int:
    from sglang_tiered_lab.trace.blocks import with_block_tokens
    from sglang_tiered_lab.trace.figures import describe

    for path in (options.json, options.plot):
        if path is not None:
            check_free(path)
    if options.plot is not None:
        from sglang_tiered_lab.trace.plot import check_plot

        check_plot(options.plot)
    source = Input.of(options)
    requests = source.load()
    if not requests:
        return 1
    if options.block_tokens is not None:
        requests = list(with_block_tokens(requests, options.block_tokens))
    if len({request.block_tokens for request in requests}) > 1:
        raise TraceError("the trace mixes block sizes; convert it to one size first.")
    figures = {
        "trace": source.path.name,
        "num_rows": source.tally.num_rows,
        "num_rows_skipped": source.tally.num_skipped,
        "num_rows_used_in_part": source.tally.num_repaired,
        **describe(requests, options.capacity),
    }
    if options.json != Path("-"):
        _print(source.path, figures)
    if options.json is not None:
        with new_file(options.json) as file:
            file.write(json.dumps(figures, indent=2).encode() + b"\n")
    if options.plot is not None:
        from sglang_tiered_lab.trace.plot import draw

        draw(figures, options.plot)
    return 0


def _print(path: Path, figures: dict[str, Any]) -> None:
    duration_s, rate = figures["duration_s"], figures["rate_per_s"]
    when = "no times" if duration_s is None else f"{duration_s:,.0f} s"
    when += "" if rate is None else f", {rate:.2f}/s"
    turns = figures["turns"]
    kind = "inferred from shared blocks" if turns["inferred"] else "as the trace says"
    by_turn = ", ".join(f"{turn}: {share:.1%}" for turn, share in turns["share"].items())
    top = figures["top_reuse_share"] or {}
    once = figures["seen_once_share"]
    print_lines(
        [
            f"{path}: {figures['num_requests']:,} requests, {when}",
            f"conversations ({kind}): {turns['num_conversations']:,}; requests by turn {by_turn}; "
            f"deepest {turns['max']}",
            f"blocks of {figures['block_tokens']} tokens: {figures['num_blocks']:,}, different "
            f"{figures['num_unique_blocks']:,} ({figures['working_set_tokens']:,} tokens)"
            + ("" if once is None else f", seen once {once:.1%}"),
            "reuses by the most reused blocks: "
            + (", ".join(f"top {name} {share:.1%}" for name, share in top.items()) or "none"),
            f"hit rate without bound: {figures['ideal_hit_rate']:.1%} of blocks, "
            f"{figures['ideal_token_hit_rate']:.1%} of tokens, "
            f"{figures['mean_request_hit_rate']:.1%} in the mean of requests; "
            f"{figures['at_most_one_hit_share']:.1%} of requests hit at most one block",
            "",
        ]
    )
    names = ("p10", "p25", "p50", "p75", "p90", "p99", "max", "mean")
    rows = [
        [title, *(f"{figures[key][name]:,.0f}" for name in names)]
        for title, key in (
            ("input tokens", "input_tokens"),
            ("output tokens", "output_tokens"),
            ("reuse distance, blocks", "reuse_distance_blocks"),
            ("reuse gap, s", "reuse_gap_s"),
        )
        if figures[key] is not None
    ]
    print_table(["", *names], rows)
    print_lines([""])
    print_table(
        ["LRU of blocks", "tokens", "of working set", "hit rate", "of tokens"],
        [
            [
                f"{row['blocks']:,}",
                f"{row['tokens']:,}",
                "-" if row["share"] is None else f"{row['share']:.1%}",
                f"{row['hit_rate']:.1%}",
                f"{row['token_hit_rate']:.1%}",
            ]
            for row in figures["lru"]
        ],
        left=0,
    )
