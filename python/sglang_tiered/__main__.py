"""``python -m sglang_tiered``: the commands of this package; ``python -m sglang_tiered NAME`` runs
one."""

from __future__ import annotations

import runpy
import sys

from sglang_tiered.errors import ConfigError
from sglang_tiered.tools.terminal import print_lines, run_program

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "launch_server": "start SGLang's server with the tiers below its radix cache",
    "store": "look into a tier's store: stat, verify, dump, gc",
    "explain": "why a request was slow, from the file of --tier-log-requests",
    "cluster": "plan a cluster of servers: plan, published",
    "trace": "recorded workloads: stat, convert, scale, replay, generate",
    "keygen": "make the keys with which servers know each other",
}
"""What each is for. Where a command has commands of its own, they are listed after the colon."""

_MODULES = {name: f"tools.{name}" for name in ("store", "explain", "keygen")}
"""Of the others, the name says it."""


def main() -> int:
    """Run the command that the command line names. Returns the exit code of a list of them."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        return run_program(lambda: _list(name))
    del sys.argv[1]
    module = f"sglang_tiered.{_MODULES.get(name, name)}"
    # As ``python -m`` would, so that processes which the command spawns find it as their parent's.
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _list(name: str) -> int:
    if name not in ("-h", "--help"):
        raise ConfigError(f"{name} is no command; python -m sglang_tiered lists what there is.")
    width = max(map(len, COMMANDS))
    print_lines(f"python -m sglang_tiered {one:{width}}  {COMMANDS[one]}" for one in COMMANDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
