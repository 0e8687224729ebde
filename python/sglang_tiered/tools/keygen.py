"""The command line of ``sglang-tiered keygen``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.tools.terminal import Parser, print_lines, run_program

if TYPE_CHECKING:
    from collections.abc import Sequence


_PROGRAM = "sglang-tiered keygen"
_DESCRIPTION = """\
Makes the keys with which prefill and decode instances know each other when they
hand over KV with --disaggregation-transfer-backend zmq, and servers that share
their pages (--tier-peers or --tier-index).

Writes a key pair for each role: prefill.key and decode.key (public), and
prefill.key_secret and decode.key_secret (mode 0600). Prints which host needs which.
Existing keys are never replaced.

A server started with --transfer-keys DIR has its own role's secret key in DIR, and
admits every peer that has the secret key to a *.key file in it.

With --role peer it writes one pair, peer.key and peer.key_secret, for all servers
that share their pages: --tier-peer-keys DIR.
"""
_EPILOG = f"""\
examples:
  {_PROGRAM} --out kv-keys
  {_PROGRAM} --role peer --out peer-keys

exit code:
  0  fine
  2  a command line or a directory that cannot be used; one sentence says why
"""
_WHAT_TO_COPY = """\
Keys are in {directory}. Start every server with --transfer-keys and a directory that holds:
  prefill hosts: prefill.key_secret and decode.key
  decode hosts:  decode.key_secret and prefill.key
Every *.key file in that directory is admitted. Keep each *.key_secret on its own hosts, mode 0600.
docs/disaggregation.md says how keys are replaced while servers serve.
"""


_WHAT_PEERS_COPY = """\
Keys are in {directory}. Start every server that shares its pages with --tier-peer-keys and a
directory that holds peer.key and peer.key_secret. Every *.key file in that directory is admitted.
Keep peer.key_secret on those hosts only, mode 0600.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the keys. Returns the exit code."""
    return run_program(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = make_parser().parse_args(arguments)
    # Imported late: --help and a mistyped flag do not need ZeroMQ.
    from sglang_tiered.wire.keys import ROLES, make_keys

    make_keys(options.out, ROLES if options.role is None else (options.role,))
    what = _WHAT_PEERS_COPY if options.role == "peer" else _WHAT_TO_COPY
    print_lines(what.format(directory=options.out).splitlines())
    return 0


def make_parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=_PROGRAM, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=layout)
    parser.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="where to; made if it is not there"
    )
    parser.add_argument(
        "--role",
        choices=("prefill", "decode", "peer"),
        help="of this role only (default: prefill and decode)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
