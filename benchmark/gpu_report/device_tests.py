"""(a) The tests that need a device: ``pytest -m gpu``, results as they come."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from gpu_report.figures import Part, SkippedError, run_part

ROOT = Path(__file__).resolve().parents[2]
# Not the server's test: that needs SGLang, and the part ``server`` asks more.
PLACES = (
    "test/kernels/page_copy",
    "test/kernels/rotary",
    "test/kernels/pod_attention/test_on_gpu.py",
    "test/gpu/test_device_memory.py",
    "test/gpu/test_random_batches.py",
)
MOST_WORKERS = 9
"""Each compiles; more than the processors of a machine would only wait for each other."""

OUTCOME = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|SKIPPED|ERROR) (\S+::\S.*)"
    r"|(\S+::\S.*?) (PASSED|FAILED|SKIPPED|ERROR)\b)",
    re.MULTILINE,
)
"""A line of a test that has ended: from a worker, or without workers."""

UNREAD = re.compile(r"^ERROR (?!.*::)(\S+\.py)\b.*", re.MULTILINE)
"""A line of a file whose tests could not be collected: a package is missing there, say."""


def run(part: Part) -> None:
    """Without a device, as in a rehearsal, every one of them must be skipped. What had ended when
    the part is stopped is counted."""
    missing = [
        name
        for name in ("pytest", "pytest_timeout", "hypothesis")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise SkippedError(f"{', '.join(missing)} not installed")
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    beside = ["-n", str(workers)] if importlib.util.find_spec("xdist") and workers > 2 else []
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-W", "default", *beside]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", "--durations=5"]
    with tempfile.TemporaryFile("w+") as said:
        try:
            subprocess.run([*command, *PLACES], cwd=ROOT, check=False, stdout=said, stderr=said)
        finally:
            said.seek(0)
            _count(part, said.read())


def _count(part: Part, said: str) -> None:
    print(said, flush=True)  # the part's log
    found = OUTCOME.findall(said)
    outcomes = Counter(one or other for one, _, _, other in found)
    failed = [
        name or test for one, name, test, other in found if (one or other) in ("FAILED", "ERROR")
    ]
    failed += [line.group() for line in UNREAD.finditer(said)]
    if not outcomes and not failed:
        raise SkippedError(f"pytest gave no result: {said[-300:]}")
    part.save("device_tests_passed", outcomes["PASSED"], "tests")
    part.save("device_tests_failed", len(failed), "tests", failed=failed[:50])
    part.save("device_tests_skipped", outcomes["SKIPPED"], "tests")


if __name__ == "__main__":
    run_part("device_tests", run)
