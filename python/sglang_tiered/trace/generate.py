"""``generate``: a trace made up from published statistics, for machines without the files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError
from sglang_tiered.tools.terminal import note, print_table
from sglang_tiered.trace.inputs import bar, layout, number, positive, real
from sglang_tiered.trace.writing import check_free, new_file, write_mooncake

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from sglang_tiered.trace.generator.fidelity import Figure, ShareGptCounts
    from sglang_tiered.trace.request import TraceRequest

__all__ = ["add_arguments", "run"]

_DESCRIPTION = """\
Makes up a trace. The same arguments give the same bytes.

  --like sharegpt  conversations with text, some behind a shared system prompt; written as
                   ShareGPT JSON (--sharegpt), as Mooncake JSON lines (--mooncake), or both
  --like mooncake  requests like the Mooncake conversation trace; --mooncake only, as what
                   its users cut and edited has no text

Then prints each figure it aims at beside the one it reached. The docstrings of
sglang_tiered.trace.generator say where every number is from.
"""
_EXAMPLES = """\
  python -m sglang_tiered.trace generate --num-conversations 2000 --sharegpt made-up.json
  python -m sglang_tiered.trace generate --like mooncake --seed 7 --mooncake made-up.jsonl
"""
_NUM_CONVERSATIONS = 1000
_RATE = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layout(parser, _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--like", choices=["sharegpt", "mooncake"], default="sharegpt")
    parser.add_argument("--sharegpt", metavar="FILE", type=Path, help="write ShareGPT JSON")
    parser.add_argument("--mooncake", metavar="FILE", type=Path, help="write Mooncake JSON lines")
    parser.add_argument("--seed", metavar="N", type=number, default=0)
    parser.add_argument(
        "--num-conversations",
        metavar="N",
        type=positive,
        help=f"how many (default: {_NUM_CONVERSATIONS}, or with a duration what the rate gives; "
        "like mooncake: 7928)",
    )
    times = parser.add_argument_group("times")
    times.add_argument(
        "--rate",
        metavar="R",
        type=real,
        help=f"conversations begun in a second (default: {_RATE:.0f}; like mooncake: 2.24)",
    )
    times.add_argument(
        "--duration-s", metavar="S", type=real, help="seconds in which they all begin"
    )
    prompts = parser.add_argument_group("system prompts (like sharegpt only)")
    prompts.add_argument(
        "--system-prompts", metavar="N", type=number, default=8, help="how many there are (8)"
    )
    prompts.add_argument(
        "--system-tokens", metavar="N", type=positive, default=512, help="length of each (512)"
    )
    prompts.add_argument(
        "--system-share",
        metavar="P",
        type=_share,
        default=0.5,
        help="share of the conversations that have one (0.5)",
    )
    parser.add_argument(
        "--block-tokens",
        metavar="N",
        type=positive,
        default=512,
        help="tokens in a block of the JSON lines (like sharegpt; default: %(default)s)",
    )


def _share(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else min(1.0, real(text))


def run(options: argparse.Namespace) -> int:
    like_mooncake = options.like == "mooncake"
    if options.sharegpt is None and options.mooncake is None:
        raise ConfigError("nothing would be written; give --sharegpt FILE or --mooncake FILE.")
    if like_mooncake and options.sharegpt is not None:
        raise ConfigError("--like mooncake has no text; give --mooncake FILE only.")
    if like_mooncake and options.block_tokens != 512:
        raise ConfigError("--like mooncake has blocks of 512 tokens; convert makes others.")
    if options.sharegpt == options.mooncake:
        raise ConfigError("--sharegpt and --mooncake name the same file; give two.")
    for path in (options.sharegpt, options.mooncake):
        if path is not None:
            check_free(path)
    figures = _like_mooncake(options) if like_mooncake else _like_sharegpt(options)
    if Path("-") not in (options.sharegpt, options.mooncake):
        print_table(["figure", "aim", "reached", "within"], [figure.row() for figure in figures])
    return 0


def _load(options: argparse.Namespace, number: int, rate: float) -> tuple[int, float]:
    """Conversations, and how many begin in a second."""
    given, duration_s = options.num_conversations, options.duration_s
    if None not in (given, duration_s, options.rate):
        raise ConfigError("--num-conversations, --rate and --duration-s: give two of the three.")
    if duration_s is None:
        return given or number, options.rate or rate
    if given is not None:
        return given, given / duration_s
    rate = options.rate or rate
    return max(1, round(rate * duration_s)), rate


def _like_mooncake(options: argparse.Namespace) -> list[Figure]:
    from sglang_tiered.trace.generator import mooncake_model
    from sglang_tiered.trace.generator.fidelity import of_mooncake

    number, rate = _load(
        options, mooncake_model.NUM_CONVERSATIONS, mooncake_model.CONVERSATIONS_PER_S
    )
    requests = list(mooncake_model.requests(options.seed, number, rate))
    write_mooncake(requests, options.mooncake)
    if number < mooncake_model.NUM_CONVERSATIONS // 2:
        note("so short a trace sees less of each conversation; its figures fall behind the aims.")
    return of_mooncake(requests)


def _like_sharegpt(options: argparse.Namespace) -> list[Figure]:
    from sglang_tiered.trace.arrivals import with_arrivals
    from sglang_tiered.trace.blocks import with_block_tokens
    from sglang_tiered.trace.generator import sharegpt_model
    from sglang_tiered.trace.generator.fidelity import ShareGptCounts, of_sharegpt

    number, rate = _load(options, _NUM_CONVERSATIONS, _RATE)
    shape = sharegpt_model.Shape(
        num_conversations=number,
        seed=options.seed,
        num_system_prompts=options.system_prompts,
        system_tokens=options.system_tokens,
        system_share=options.system_share,
    )
    counts = ShareGptCounts()
    timed: list[TraceRequest] = []
    with contextlib.ExitStack() as stack:
        write = None
        if options.sharegpt is not None:
            write = stack.enter_context(new_file(options.sharegpt)).write
        advance = stack.enter_context(bar("generating", number, least=2000))
        requests = _requests(sharegpt_model.rows(shape), counts, write, options, advance)
        if options.mooncake is None:
            for _ in requests:
                pass
        else:
            timed = list(with_arrivals(requests, conversations_per_s=rate, seed=options.seed))
            write_mooncake(with_block_tokens(timed), options.mooncake)
    return of_sharegpt(counts, timed)


def _requests(
    rows: Iterator[bytes],
    counts: ShareGptCounts,
    write: Callable[[bytes], object] | None,
    options: argparse.Namespace,
    advance: Callable[[int], None],
) -> Iterator[TraceRequest]:
    """Writes and counts the conversations as they pass; yields requests where they are wanted."""
    import msgspec

    from sglang_tiered.trace import sharegpt
    from sglang_tiered.trace.text import Tokens

    tokens = Tokens(options.block_tokens)
    if write is not None:
        write(b"[")
    for done, row in enumerate(rows, start=1):
        if write is not None:
            write((b"\n" if done == 1 else b",\n") + row)
        counts.add(msgspec.json.decode(row))
        if options.mooncake is not None:
            yield from sharegpt.decode(row, done, tokens)[0]
        advance(done)
    if write is not None:
        write(b"\n]\n")
