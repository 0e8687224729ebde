"""Which processes of a server on a CPU are forks, and what those take over."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kit.commands import ran

_STARTS = """
import atexit, json, multiprocessing, signal, sys, threading
from multiprocessing import resource_tracker
from sglang_tiered.integration.platforms import processes

imported = []

def tell(name=None):
    if name:
        atexit.register(lambda: print(json.dumps(name), flush=True))
    print(json.dumps({
        "forked": bool(imported),
        "interrupts": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
        "quits": signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL,
        "starts by": multiprocessing.get_start_method(),
        "tracked": resource_tracker._resource_tracker._fd is not None,
    }), flush=True)

def start():
    process = multiprocessing.Process(target=tell, args=("child ended",))
    process.start()
    process.join()

if __name__ == "__main__":
    imported.append("once")
    atexit.register(lambda: print(json.dumps("launcher ended"), flush=True))
    if sys.argv[1] != "engine":
        processes.fork_from_here("cuda" if sys.argv[1] == "on cuda" else "cpu")
    ended = threading.Event()
    if sys.argv[1] == "threads":
        threading.Thread(target=ended.wait).start()
    signal.signal(signal.SIGQUIT, lambda *_: None)  # both as SGLang does
    multiprocessing.set_start_method("spawn", force=True)
    processes.around_start(start)
    tell()
    ended.set()
"""


@pytest.mark.parametrize(
    ("who", "forked", "interrupts"),
    [("launcher", True, False), *((who, False, True) for who in ("on cuda", "threads", "engine"))],
)
def test_only_the_launcher_without_threads_forks(
    tmp_path: Path, who: str, forked: bool, interrupts: bool
) -> None:
    """Forks import nothing again. A lock that a thread holds would stay locked in one, and so would
    those of a user's process; what a fork starts later, with threads of its own, is spawned."""
    script = tmp_path / "starts.py"
    script.write_text(_STARTS)
    ended = ran(sys.executable, script, who, timeout_s=120)
    assert ended.returncode == 0, ended.stderr
    child, child_end, launcher, launcher_end = map(json.loads, ended.stdout.splitlines())
    told = {"quits": True, "starts by": "spawn", "tracked": True}
    assert child == {"forked": forked, "interrupts": interrupts, **told}
    assert launcher == {**child, "forked": True, "interrupts": True, "quits": False}
    assert (child_end, launcher_end) == ("child ended", "launcher ended")


_KILLED = """
import multiprocessing, os, signal
from sglang_tiered.integration.platforms import processes

launcher = os.getpid()

def outlive():
    while os.getppid() == launcher:
        pass

def start():
    multiprocessing.Process(target=print, args=("runs",)).start()
    os.kill(launcher, signal.SIGKILL)

processes.fork_from_here("cpu")
os.register_at_fork(after_in_child=outlive)
processes.around_start(start)
"""


def test_fork_of_a_killed_launcher_ends() -> None:
    """It asked to die with its parent when that one was dead, and served nobody for good."""
    ended = ran(sys.executable, "-c", _KILLED, timeout_s=120)
    assert (ended.returncode, ended.stdout) == (-9, "")


_INTERRUPTED = """
import multiprocessing, os, signal
from sglang_tiered.integration.platforms import processes

def start():
    os.register_at_fork(before=lambda: signal.raise_signal(signal.SIGINT))
    process = multiprocessing.Process(target=print, args=("runs",))
    process.start()
    process.join()

processes.fork_from_here("cpu")
try:
    processes.around_start(start)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_during_a_fork_ends_the_launcher() -> None:
    """Python drops what is raised while it calls what runs around a fork, and the server stayed."""
    ended = ran(sys.executable, "-c", _INTERRUPTED, timeout_s=120)
    assert (ended.stdout, ended.stderr) == ("runs\ninterrupted\n", "")
