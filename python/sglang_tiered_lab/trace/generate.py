"""``generate``: conversations made up from published statistics, for machines without the files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError
from sglang_tiered_lab.trace.inputs import bar, layout, number, positive, real
from sglang_tiered_lab.trace.writing import check_free, new_file, write_mooncake

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from sglang_tiered_lab.trace.request import TraceRequest


_DESCRIPTION = """\
Makes up conversations like those of ShareGPT, with text, some behind a shared system
prompt; writes them as ShareGPT JSON (--sharegpt), as Mooncake JSON lines (--mooncake),
or both. The same arguments give the same bytes.

The docstring of sglang_tiered_lab.trace.sharegpt_model says where every number
is from.
"""
_EXAMPLES = """\
  sglang-tiered trace generate --num-conversations 2000 --sharegpt made-up.json
  sglang-tiered trace generate --seed 7 --mooncake made-up.jsonl
"""
_NUM_CONVERSATIONS = 1000
_RATE = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layout(parser, _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--sharegpt", metavar="FILE", type=Path, help="write ShareGPT JSON")
    parser.add_argument("--mooncake", metavar="FILE", type=Path, help="write Mooncake JSON lines")
    parser.add_argument("--seed", metavar="N", type=number, default=0)
    parser.add_argument(
        "--num-conversations",
        metavar="N",
        type=positive,
        help=f"how many (default: {_NUM_CONVERSATIONS}, or with a duration what the rate gives)",
    )
    times = parser.add_argument_group("times")
    times.add_argument(
        "--rate",
        metavar="R",
        type=real,
        help=f"conversations begun in a second (default: {_RATE:.0f})",
    )
    times.add_argument(
        "--duration-s", metavar="S", type=real, help="seconds in which they all begin"
    )
    prompts = parser.add_argument_group("system prompts")
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
        help="tokens in a block of the JSON lines (default: %(default)s)",
    )


def _share(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else min(1.0, real(text))


def run(options: argparse.Namespace) -> int:
    if options.sharegpt is None and options.mooncake is None:
        raise ConfigError("nothing would be written; give --sharegpt FILE or --mooncake FILE.")
    if options.sharegpt == options.mooncake:
        raise ConfigError("--sharegpt and --mooncake name the same file; give two.")
    for path in (options.sharegpt, options.mooncake):
        if path is not None:
            check_free(path)
    _generate(options)
    return 0


def _load(options: argparse.Namespace) -> tuple[int, float]:
    """Conversations, and how many begin in a second."""
    given, duration_s = options.num_conversations, options.duration_s
    if None not in (given, duration_s, options.rate):
        raise ConfigError("--num-conversations, --rate and --duration-s: give two of the three.")
    if duration_s is None:
        return given or _NUM_CONVERSATIONS, options.rate or _RATE
    if given is not None:
        return given, given / duration_s
    rate = options.rate or _RATE
    return max(1, round(rate * duration_s)), rate


def _generate(options: argparse.Namespace) -> None:
    from sglang_tiered_lab.trace import sharegpt_model
    from sglang_tiered_lab.trace.arrivals import with_arrivals
    from sglang_tiered_lab.trace.blocks import with_block_tokens

    number, rate = _load(options)
    shape = sharegpt_model.Shape(
        num_conversations=number,
        seed=options.seed,
        num_system_prompts=options.system_prompts,
        system_tokens=options.system_tokens,
        system_share=options.system_share,
    )
    with contextlib.ExitStack() as stack:
        write = None
        if options.sharegpt is not None:
            write = stack.enter_context(new_file(options.sharegpt)).write
        advance = stack.enter_context(bar("generating", number, least=2000))
        requests = _requests(sharegpt_model.rows(shape), write, options, advance)
        if options.mooncake is None:
            for _ in requests:
                pass
        else:
            timed = with_arrivals(requests, conversations_per_s=rate, seed=options.seed)
            write_mooncake(with_block_tokens(timed), options.mooncake)


def _requests(
    rows: Iterator[bytes],
    write: Callable[[bytes], object] | None,
    options: argparse.Namespace,
    advance: Callable[[int], None],
) -> Iterator[TraceRequest]:
    """Writes the conversations as they pass; yields requests where they are wanted."""
    from sglang_tiered_lab.trace.rows import Row
    from sglang_tiered_lab.trace.sharegpt import ConversationReader
    from sglang_tiered_lab.trace.text import Tokens

    reader = ConversationReader(Tokens(options.block_tokens))
    if write is not None:
        write(b"[")
    for done, row in enumerate(rows, start=1):
        if write is not None:
            write((b"\n" if done == 1 else b",\n") + row)
        if options.mooncake is not None:
            yield from reader.decode(Row(done, done, row))[0]
        advance(done)
    if write is not None:
        write(b"\n]\n")
