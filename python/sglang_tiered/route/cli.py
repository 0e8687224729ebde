"""The command line of ``sglang-tiered route``."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from sglang_tiered.flags import add_arguments, require, values_of
from sglang_tiered.loopback import ask_loopback_directly
from sglang_tiered.route.settings import RouteConfig
from sglang_tiered.tools.terminal import Parser, run_program

if TYPE_CHECKING:
    from collections.abc import Sequence


_PROGRAM = "sglang-tiered route"
_DESCRIPTION = """\
The front of a cluster of SGLang servers: requests go where they are answered
soonest, by what each server says of its queue, its prices and its pages.
"""
_SERVE = """\
Starts Envoy, and the picker that it asks for every request. Where the picker does
not answer, Envoy chooses by itself. SIGTERM lets running answers end.
"""
_EPILOG = f"""\
examples:
  {_PROGRAM} serve --servers servers.txt
  {_PROGRAM} serve --servers dns://sglang.default.svc:30000 --host 0.0.0.0
  {_PROGRAM} serve --servers servers.txt --envoy off --picker-host 0.0.0.0

exit code:
  0  stopped by SIGTERM
  1  Envoy ended by itself
  2  a command line, file or port that cannot be used; one sentence says why
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of ``sglang-tiered route``. Returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return run_program(lambda: _run(given))


def _run(given: list[str]) -> int:
    options = make_parser().parse_args(given)
    config = RouteConfig(**values_of(RouteConfig, vars(options)))
    for package in ("grpc", "aiohttp", "jinja2"):
        require("sglang-tiered route serve", package)
    logging.basicConfig(level=logging.INFO, format="route: %(message)s", stream=sys.stderr)
    ask_loopback_directly()
    # Imported late: --help and a mistyped flag need none of it.
    if not config.with_envoy:
        from sglang_tiered.route.service import run_picker

        return run_picker(config, with_parent=options.with_parent)
    from sglang_tiered.route.envoy import run_front

    return run_front(config, given)


def make_parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=_PROGRAM, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=layout)
    below = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = below.add_parser(
        "serve",
        help="start Envoy and its picker",
        description=_SERVE,
        epilog=_EPILOG,
        formatter_class=layout,
    )
    add_arguments(serve.add_argument_group("flags"), RouteConfig)
    serve.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
