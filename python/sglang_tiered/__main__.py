"""``sglang-tiered``, which is ``python -m sglang_tiered``: the commands of this package;
``sglang-tiered NAME`` runs one."""

from __future__ import annotations

import difflib
import runpy
import sys
from dataclasses import dataclass

from sglang_tiered.errors import ConfigError
from sglang_tiered.tools.installed import install_command, requirement_of, version_lines
from sglang_tiered.tools.terminal import note, print_lines, run_program

__all__ = ["COMMANDS", "OPTIONS", "PROGRAM", "Command", "main"]

PROGRAM = "sglang-tiered"
OPTIONS = {
    "--help": "this list; after a command, what that command takes",
    "--version": "versions for a bug report, and which packages are missing",
}


@dataclass(frozen=True)
class Command:
    """``purpose``: what it is for; where a command has commands of its own, they are listed after
    the colon. ``module`` is run as ``python -m`` runs it, and its ``make_parser`` gives the command
    line, for completion."""

    purpose: str
    module: str


COMMANDS = {
    "serve": Command(
        "start SGLang's server with the tiers below its radix cache",
        "sglang_tiered.launch_server",
    ),
    "demo": Command(
        "what the tiers do, in about two minutes, with a small model",
        "sglang_tiered.demo.command",
    ),
    "route": Command(
        "the front of a cluster, by Envoy: serve",
        "sglang_tiered.route.cli",
    ),
    "store": Command(
        "look into a tier's store: stat, verify, dump, gc",
        "sglang_tiered.tools.store.cli",
    ),
    "explain": Command(
        "why a request was slow, from the file of --tier-log-requests",
        "sglang_tiered.tools.explain.cli",
    ),
    "cluster": Command(
        "plan a cluster of servers: plan, published",
        "sglang_tiered_lab.cluster.cli",
    ),
    "trace": Command(
        "recorded workloads: stat, convert, scale, replay, generate",
        "sglang_tiered_lab.trace.cli",
    ),
    "keygen": Command(
        "make the keys of a handoff, and of servers that share pages",
        "sglang_tiered.tools.keygen",
    ),
    "completion": Command(
        "a shell's script that completes all of this",
        "sglang_tiered.completion",
    ),
}
"""By name, in the order of ``--help``. One row adds a command."""


def main() -> int:
    """Run the command that the command line names. Returns the exit code of a list of them, or of a
    command whose packages are missing."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        return run_program(lambda: _answer(name))
    del sys.argv[1]
    try:
        # As ``python -m`` would, so that processes which the command spawns find it as their
        # parent's.
        runpy.run_module(COMMANDS[name].module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        package = requirement_of(error.name or "")
        if package is None:  # of a package that is there, or ours: a fault, not an installation
            raise
        note(
            f"{PROGRAM} {name} needs the package {package}, which is not installed; "
            f"{install_command()} installs all that is missing."
        )
        return 2
    return 0


def _answer(name: str) -> int:
    if name in ("-V", "--version"):
        print_lines(version_lines())
        return 0
    if name not in ("-h", "--help"):
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.7)
        raise ConfigError(
            f"{name} is no command; "
            + (f"the nearest is {near[0]}, and " if near else "")
            + f"{PROGRAM} --help lists what there is."
        )
    rows = {f"{PROGRAM} {one}": command.purpose for one, command in COMMANDS.items()}
    rows |= {f"{PROGRAM} {option}": purpose for option, purpose in OPTIONS.items()}
    width = max(map(len, rows))
    print_lines(f"{row:{width}}  {purpose}" for row, purpose in rows.items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
