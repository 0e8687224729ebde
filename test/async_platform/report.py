"""What the asynchronous platform saw in a process: violations, and which seams have run.

Lines of JSON, appended one write each to the file that ``ASYNC_PLATFORM_REPORT`` names, by every
process that has it. A seam writes a line the first time it runs: a server that is killed has no
last moment.
"""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_OF_A_NAME = 20
"""Violations of one name that a process writes with their stacks."""
STACK_LIMIT = 14


@dataclass
class Report:
    path: str | None = None
    violations: list[dict[str, Any]] = field(default_factory=list)
    runs: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def violation(self, what: str, **details: Any) -> None:
        """Something is wrong. Never raises, or the scheduler would end instead of going on."""
        stack = traceback.format_stack(limit=STACK_LIMIT)[:-1]
        entry = {"violation": what, "pid": os.getpid(), **details, "stack": stack}
        with self._lock:
            self.violations.append(entry)
            number = sum(one["violation"] == what for one in self.violations)
        if number <= MAX_OF_A_NAME:
            self._write(entry)

    def ran(self, seam: str) -> None:
        with self._lock:
            self.runs[seam] += 1
            is_first = self.runs[seam] == 1
        if is_first:
            self._write({"seam": seam, "pid": os.getpid()})

    def take(self) -> list[str]:
        with self._lock:
            names = [entry["violation"] for entry in self.violations]
            self.violations.clear()
        return names

    def _write(self, entry: dict[str, Any]) -> None:
        if self.path is not None:
            with open(self.path, "ab", buffering=0) as file:
                file.write(json.dumps(entry, default=str).encode() + b"\n")


@dataclass(frozen=True)
class Seen:
    """What the processes of a server reported."""

    violations: list[dict[str, Any]]
    seams: set[str]

    def told(self) -> str:
        """The violations for a person: each name with its number, and one of each whole."""
        names = Counter(entry["violation"] for entry in self.violations)
        first = {entry["violation"]: entry for entry in reversed(self.violations)}
        return "\n".join(
            f"{number} x {first[name] | {'stack': ''}}\n" + "".join(first[name]["stack"])
            for name, number in names.items()
        )


def read(path: Path) -> Seen:
    """The report so far; of a process that was killed in the middle of a line, all but that."""
    entries = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return Seen(
        [entry for entry in entries if "violation" in entry],
        {entry["seam"] for entry in entries if "seam" in entry},
    )
