"""What the plugin does in processes that SGLang starts, and leaves alone in others."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_STARTS = """
import gc, multiprocessing, pathlib, signal, sys
from multiprocessing import util
gc.disable()
from sglang.srt.plugins import load_plugins
from sglang_tiered.integration import plugin

def with_an_engine():
    load_plugins()

def tell():
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    # A file each: what libraries print would stand among lines of the standard output.
    pathlib.Path(sys.argv[1], multiprocessing.current_process().name).write_text(str(ignored))

# Forks, so that SGLang is imported once; whose process one is, is told by its target all the same.
fork = multiprocessing.get_context("fork")
util.register_after_fork(fork, lambda _: util.Finalize(None, tell, exitpriority=0))
targets = {"scheduler": load_plugins, "worker": with_an_engine}
processes = [fork.Process(name=name, target=targets[name]) for name in targets]
for process in processes:
    process.start()
for process in processes:
    process.join()
plugin._leave_interrupts_to_the_launcher()  # all of it that is to see here: it imports SGLang
tell()
"""


def test_only_sglangs_own_processes_leave_ctrl_c(tmp_path: Path) -> None:
    """A user's process that holds an engine stays one that Ctrl-C ends."""
    script = tmp_path / "starts.py"
    script.write_text(_STARTS)
    told = tmp_path / "told"
    told.mkdir()
    ended = subprocess.run(
        [sys.executable, str(script), str(told)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    expected = {"scheduler": "True", "worker": "False", "MainProcess": "False"}
    assert {file.name: file.read_text() for file in told.iterdir()} == expected
