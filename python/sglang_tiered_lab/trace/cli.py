"""The command line of ``sglang-tiered trace``. A command is a module with
``add_arguments(parser)`` and ``run(options) -> int``; one line in ``_COMMANDS`` adds it."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from sglang_tiered.tools.terminal import Parser, run_program

if TYPE_CHECKING:
    from collections.abc import Sequence


_DESCRIPTION = """\
Reads recorded workloads (conversations as ShareGPT or OpenAI messages; Mooncake,
Qwen-Bailian and Azure traces), says what a cache can make of
them, and makes others of them.
"""
_EPILOG = """\
exit code:
  0  fine
  1  nothing in the trace can be used
  2  a command line or a file that cannot be used, such as one of which more than a
     tenth would be dropped; one sentence says why

%(prog)s COMMAND --help tells more of each command.
"""
# Name, module, and the line that --help has for it. Modules import what is heavy when they run.
_COMMANDS = (
    ("stat", "sglang_tiered_lab.trace.stat", "lengths, turns, reuse, and hit rate by cache size"),
    ("convert", "sglang_tiered_lab.trace.convert", "any form to Mooncake; other blocks; slices"),
    ("scale", "sglang_tiered_lab.trace.scale", "shrink a trace to a model and a machine"),
    (
        "replay",
        "sglang_tiered_lab.trace.replay.command",
        "policies and tier sizes, without a model",
    ),
    ("generate", "sglang_tiered_lab.trace.generate", "make up conversations like ShareGPT's"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    return run_program(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = make_parser().parse_args(arguments)
    return int(options.run(options))


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sglang-tiered trace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for name, module_name, line in _COMMANDS:
        module = importlib.import_module(module_name)
        command = commands.add_parser(name, help=line)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
