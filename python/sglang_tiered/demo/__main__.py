"""What the tiers do, seen in some two minutes.

Starts the demo server and asks more prompts than device and host memory hold, twice. Then kills the
server with ``kill -9``, starts it on the same directory and asks again. Then one table: how soon
the first token came, and from which tier the prompt's tokens.
"""

from __future__ import annotations

import sys

from sglang_tiered.demo.interruption import Interruption


def main() -> int:
    interruption = Interruption()
    interruption.install()  # before the imports that take time
    from sglang_tiered.demo.command import run
    from sglang_tiered.tools.terminal import run_program

    return run_program(lambda: run(sys.argv[1:], interruption))


if __name__ == "__main__":
    sys.exit(main())
