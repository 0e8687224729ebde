"""Where the processor time of a server goes, thread by thread, as the kernel counts it.

Python threads have their names by ``thread_names/sitecustomize.py``. Threads that no Python code
started (OpenMP's, above all) have the name of the process, and are ``native`` here.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


NAMES = Path(__file__).parents[1] / "thread_names"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MIN_SHARE = 0.005  # of what is named in a note
_NUMBER = re.compile(r"[-_/]?\d+(_\d+)?$")

Threads = dict[tuple[int, int], tuple[str, float]]
"""Label and processor seconds by process and thread; thread 0 is the whole process, those of its
threads that have ended included."""


def naming_threads() -> dict[str, str]:
    """The environment of a server whose Python threads have their names in the kernel."""
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(NAMES), *([path] if path else [])])}


def parse_stat(text: str) -> tuple[str, float]:
    """Name and processor seconds in ``/proc/PID/stat`` or ``/proc/PID/task/TID/stat``."""
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    return head.partition("(")[2], (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def take(pid: int) -> Threads:
    """The threads of a server's processes."""
    threads: Threads = {}
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            title = process.cmdline()[0]
            is_named = title.startswith("sglang::")
            name = title.removeprefix("sglang::") if is_named else "other"
            label = "http" if process == root else name
            threads |= _threads(Path(f"/proc/{process.pid}"), label)
    return threads


def _threads(folder: Path, label: str) -> Threads:
    pid = int(folder.name)
    own, total_s = parse_stat((folder / "stat").read_text())
    found: Threads = {(pid, 0): (f"{label}: ended", total_s)}
    for task in (folder / "task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            name, seconds = parse_stat((task / "stat").read_text())
            kind = "native" if name == own else _NUMBER.sub("", name)
            is_main = task.name == folder.name
            found[pid, int(task.name)] = label if is_main else f"{label}: {kind}", seconds
    return found


def between(before: Threads, after: Threads) -> dict[str, float]:
    """Processor seconds by label; threads that ended in between are together."""
    spent: dict[str, float] = {}
    alive: dict[int, float] = {}
    for (pid, tid), (label, seconds) in after.items():
        taken = seconds - before.get((pid, tid), ("", 0.0))[1]
        if tid:
            spent[label] = spent.get(label, 0.0) + taken
            alive[pid] = alive.get(pid, 0.0) + taken
    for (pid, tid), (label, seconds) in after.items():
        if not tid:
            total = seconds - before.get((pid, 0), ("", 0.0))[1]
            spent[label] = spent.get(label, 0.0) + max(total - alive.get(pid, 0.0), 0.0)
    return spent


@contextlib.contextmanager
def measuring(processes: Mapping[str, int], into: dict[str, dict[str, float]]) -> Iterator[None]:
    """What the threads of each system, by name its process, take within the block, also while
    others are asked."""
    before = {name: take(pid) for name, pid in processes.items()}
    yield
    for name, pid in processes.items():
        into[name] = between(before[name], take(pid))


def describe_shares(seconds: Mapping[str, float]) -> str:
    """Who took which part, the largest first."""
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda each: -each[1])
    return ", ".join(
        f"{label} {taken / total:.1%}" for label, taken in ordered if taken > total * MIN_SHARE
    )
