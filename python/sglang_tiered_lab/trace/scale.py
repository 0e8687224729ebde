"""``scale``: shrink a trace to a model and a machine, and say what stayed the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError
from sglang_tiered.tools.terminal import print_table
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
    from collections.abc import Sequence

    from sglang_tiered_lab.trace.request import TraceRequest


_DESCRIPTION = """\
Multiplies all lengths by one factor, the block size with them, so that every request
keeps its blocks and with them its hits. Writes Mooncake JSON lines with the new block
size in them (block_size), conversations and turns (inferred where the trace has none).
Prints the ratios that matter to a cache, before and after.

--tokens-max alone shrinks until the longest request fits. With --block-tokens too, that
gives the factor, and requests which would still be longer are left out: the longest few
of a trace are often many times the median, which would shrink to nothing with them.
"""
_EXAMPLES = """\
  sglang-tiered trace scale conversation.jsonl --tokens-max 4096 --block-tokens 64 \\
      --sessions 200 --time-factor 0.1 -o small.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layout(parser, _DESCRIPTION, _EXAMPLES)
    add_input_arguments(
        parser, "tokens in a block afterwards (default: as many as --tokens-max allows)"
    )
    add_output_argument(parser)
    parser.add_argument(
        "--tokens-max", metavar="N", type=positive, help="longest prompt and answer together"
    )
    parser.add_argument(
        "--sessions", metavar="N", type=positive, help="keep N conversations, drawn by --seed"
    )
    parser.add_argument(
        "--time-factor",
        metavar="F",
        type=real,
        default=1.0,
        help="multiplies arrival times; 0.1 is ten times the load (default: %(default)s)",
    )
    parser.add_argument(
        "--rate", metavar="R", type=real, help="as --time-factor, to so many requests a second"
    )
    parser.add_argument("--seed", metavar="N", type=number, default=0, help="of the draw")


def run(options: argparse.Namespace) -> int:
    from sglang_tiered_lab.trace.scaling import Scaling, scale
    from sglang_tiered_lab.trace.writing import write_mooncake

    if options.rate is not None and options.time_factor != 1.0:
        raise ConfigError("--rate and --time-factor both set the time; give one of them.")
    check_free(options.output)
    requests = Input.of(options).load_timed(seed=options.seed)
    if not requests:
        return 1
    scaling = Scaling(
        tokens_max=options.tokens_max,
        block_tokens=options.block_tokens,
        num_sessions=options.sessions,
        time_factor=options.time_factor,
        seed=options.seed,
    )
    scaled = scale(requests, scaling)
    if options.rate is not None:
        scaled = _at_rate(scaled, options.rate)
    write_mooncake(scaled, options.output)
    # Beside a trace on standard output there is room on stderr only.
    if str(options.output) != "-":
        print_table(["", "before", "after", "kept"], compare(requests, scaled))
    return 0


def _at_rate(requests: list[TraceRequest], rate: float) -> list[TraceRequest]:
    import msgspec

    duration_s = requests[-1].arrival_s or 0.0
    factor = len(requests) / rate / duration_s if duration_s else 1.0
    return [
        msgspec.structs.replace(request, arrival_s=(request.arrival_s or 0.0) * factor)
        for request in requests
    ]


def compare(
    before: Sequence[TraceRequest], after: Sequence[TraceRequest]
) -> list[tuple[str, str, str, str]]:
    """Rows of a table: the ratios that scaling means to keep, and whether it did, to a point (or a
    fiftieth, where they are no shares); then what it means to change."""
    kept = [
        (name, _shown(one, is_share), _shown(other, is_share), _is_kept(one, other, is_share))
        for (name, one, is_share), (_, other, _) in zip(
            _ratios(before), _ratios(after), strict=True
        )
    ]
    changed = [
        (name, one, other, "-")
        for (name, one), (_, other) in zip(_sizes(before), _sizes(after), strict=True)
    ]
    return kept + changed


def _shown(ratio: float, is_share: bool) -> str:
    return f"{ratio:.1%}" if is_share else f"{ratio:.2f}"


def _is_kept(before: float, after: float, is_share: bool) -> str:
    return "yes" if abs(after - before) <= (0.01 if is_share else before / 50) else "no"


def _ratios(requests: Sequence[TraceRequest]) -> list[tuple[str, float, bool]]:
    from sglang_tiered_lab.trace.figures import CURVE_SHARES, describe
    from sglang_tiered_lab.trace.reuse import measure

    figures = describe(requests)
    reuse = measure(requests)
    turns = figures["turns"]
    contexts = sum(request.context_length for request in requests)
    prompts = sum(request.input_length for request in requests)
    curve = [(share, reuse.hit_rate(round(share * reuse.num_unique))) for share in CURVE_SHARES]
    return [
        ("ideal hit rate, blocks", figures["ideal_hit_rate"], True),
        ("ideal hit rate, tokens", figures["ideal_token_hit_rate"], True),
        *(
            (f"LRU hit rate at {share:.0%} of working set", rate, True)
            for share, rate in curve[:-1]
        ),
        ("requests in their first turn", turns["share"]["1"], True),
        ("prompt tokens over context tokens", prompts / max(1, contexts), True),
        ("requests per conversation", len(requests) / turns["num_conversations"], False),
    ]


def _sizes(requests: Sequence[TraceRequest]) -> list[tuple[str, str]]:
    from sglang_tiered_lab.trace.reuse import measure

    reuse = measure(requests)
    contexts = sorted(request.context_length for request in requests)
    duration_s = (requests[-1].arrival_s or 0.0) - (requests[0].arrival_s or 0.0)
    return [
        ("requests", f"{len(requests):,}"),
        ("working set, tokens", f"{int(reuse.tokens[reuse.previous < 0].sum()):,}"),
        ("context, median and longest", f"{contexts[len(contexts) // 2]:,}, {contexts[-1]:,}"),
        ("block, tokens", f"{requests[0].block_tokens}"),
        ("requests a second", f"{len(requests) / duration_s:.2f}" if duration_s else "-"),
    ]
