"""What a part of the report writes: a line of JSON a figure, at once, so that none is lost."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class SkippedError(Exception):
    """This machine cannot answer a question; the text says why."""


@dataclass(frozen=True)
class Part:
    """A part while it runs. ``rehearse``: the program's logic on a CPU, with tiny sizes."""

    file: Path
    rehearse: bool
    quick: bool
    folder: Path  # for files, on the disk in question; removed afterwards

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda:0"

    def size(self, whole: int, quick: int, rehearsed: int) -> int:
        """The size of something for this run."""
        return rehearsed if self.rehearse else quick if self.quick else whole

    def save(self, name: str, value: float, unit: str, **more: Any) -> None:
        """Keep one figure. ``more`` goes along into ``report.json``."""
        self._write({"name": name, "value": value, "unit": unit, **more})

    def save_samples(self, name: str, values: Sequence[float], unit: str, **more: Any) -> None:
        """Keep the median of samples, with their spread."""
        spread = {"min": min(values), "max": max(values), "n": len(values)}
        self.save(name, statistics.median(values), unit, **spread, **more)

    def skip(self, name: str, reason: str) -> None:
        """Say why there is no such figure."""
        self._write({"name": name, "skipped": " ".join(reason.split())[-400:]})

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def run_part(name: str, run: Callable[[Part], None]) -> None:
    """The program of a part: ``python -m gpu_report.NAME --file FILE --folder DIR``. A skip is an
    answer; any other exception ends the process with it."""
    parser = argparse.ArgumentParser(prog=f"gpu_report.{name}")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    # At its deadline: what the part has started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    part = Part(options.file, options.rehearse, options.quick, options.folder)
    try:
        run(part)
    except SkippedError as error:
        part.skip(name, str(error))
        sys.exit(0)
