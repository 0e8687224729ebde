"""The command line of ``sglang-tiered cluster``. A command is a module with
``add_arguments(parser)`` and ``run(options) -> int``, as of ``sglang_tiered_lab.trace``."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from sglang_tiered.tools.terminal import Parser, run_program

if TYPE_CHECKING:
    from collections.abc import Sequence


_EPILOG = """\
examples:
  %(prog)s plan trace.jsonl --fleet 64:h100 --fleet 32:h100,32:a100 --ttft 2s --tpot 50ms
  %(prog)s plan trace.jsonl --fleet 8:h100 --exhaustive
  %(prog)s published

exit code:
  0  fine
  2  a command line or a file that cannot be used; one sentence says why

%(prog)s COMMAND --help tells more of each command.
"""
_COMMANDS = (
    ("plan", "how many servers, of what, in which roles, for a trace and its limits"),
    ("published", "what published plans come to here, beside what their authors print"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    return run_program(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = make_parser().parse_args(arguments)
    return int(options.run(options))


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sglang-tiered cluster",
        description="Plans a cluster of servers, by simulation.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for name, line in _COMMANDS:
        module = importlib.import_module(f"sglang_tiered_lab.cluster.{name}")
        command = commands.add_parser(name, help=line)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
