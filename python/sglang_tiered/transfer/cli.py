"""The command line of ``python -m sglang_tiered.transfer``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.terminal import Parser, print_lines, run_program

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_PROGRAM = "python -m sglang_tiered.transfer"
_DESCRIPTION = """\
Makes the keys with which prefill and decode instances know each other when they
hand over KV with --disaggregation-transfer-backend zmq, and servers that share
their pages (--tier-index).
"""
_EPILOG = """\
exit code:
  0  fine
  2  a command line or a directory that cannot be used; one sentence says why

%(prog)s COMMAND --help tells more of each command.
"""
_KEYGEN = """\
Writes a key pair for each role: prefill.key and decode.key (public), and
prefill.key_secret and decode.key_secret (mode 0600). Prints which host needs which.
Keys that are there already are never replaced.

A server started with --transfer-keys DIR has its own role's secret key in DIR, and
admits whoever has the secret key to any *.key file in it.

With --role peer it writes one pair, peer.key and peer.key_secret, for all servers
that share their pages: --tier-peer-keys DIR.
"""
_EXAMPLES = f"""\
examples:
  {_PROGRAM} keygen --out kv-keys
  {_PROGRAM} keygen --role peer --out peer-keys
"""
_WHAT_TO_COPY = """\
Keys are in {directory}. Start every server with --transfer-keys and a directory that holds:
  prefill hosts: prefill.key_secret and decode.key
  decode hosts:  decode.key_secret and prefill.key
Every *.key file in that directory is admitted. Keep each *.key_secret on its own hosts, mode 0600.
"""


_WHAT_PEERS_COPY = """\
Keys are in {directory}. Start every server that shares its pages with --tier-peer-keys and a
directory that holds peer.key and peer.key_secret. Every *.key file in that directory is admitted.
Keep peer.key_secret on those hosts only, mode 0600.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    return run_program(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    return _keygen(options.out, options.role)


def _keygen(directory: Path, role: str | None) -> int:
    # Imported late: --help and a mistyped flag do not need ZeroMQ.
    from sglang_tiered.transfer.security import ROLES, make_keys

    make_keys(directory, ROLES if role is None else (role,))
    what = _WHAT_PEERS_COPY if role == "peer" else _WHAT_TO_COPY
    print_lines(what.format(directory=directory).splitlines())
    return 0


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=_PROGRAM, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=layout)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    keygen = commands.add_parser(
        "keygen",
        help="make the keys of both roles",
        description=_KEYGEN,
        epilog=_EXAMPLES,
        formatter_class=layout,
    )
    keygen.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="where to; made if it is not there"
    )
    keygen.add_argument(
        "--role",
        choices=("prefill", "decode", "peer"),
        help="of this role only (default: prefill and decode)",
    )
    return parser
