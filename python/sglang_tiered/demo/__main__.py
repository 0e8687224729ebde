"""What the tiers do, seen in some two minutes.

Starts the demo server and asks more prompts than device and host memory hold, twice. Then kills the
server with ``kill -9``, starts it on the same directory and asks again. Then one table: how soon
the first token came, and from which tier the prompt's tokens.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sglang_tiered.tools.terminal import run_program

if TYPE_CHECKING:
    import argparse

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    from sglang_tiered.demo import command

    return command.make_parser()


def main() -> int:
    # Imported within, as it takes time, in which Ctrl-C is to be one line too.
    from sglang_tiered.demo.command import Interruption, run

    interruption = Interruption()
    interruption.install()
    return run(sys.argv[1:], interruption)


if __name__ == "__main__":
    sys.exit(run_program(main))
