"""A server that joins a control group before anything else: arguments are the group's file of
processes, and those of the launcher."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    Path(sys.argv.pop(1)).write_text(str(os.getpid()))
    runpy.run_module("sglang_tiered.launch_server", run_name="__main__", alter_sys=True)
