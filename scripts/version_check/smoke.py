"""What runs under another SGLang, beyond the comparison of its names: the one list of tests.

``units`` are all unit tests of ``integration``: they run SGLang's own classes. ``live`` starts
servers with tiers: prompts are asked more than memory holds, asked again, the server is killed with
-9, started again and asked again; answers are those of SGLang without tiers, and what was stored is
a hit. And a prefill and a decode server hand over a request.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


PARTS: dict[str, tuple[str, ...]] = {
    "units": ("test/unit/integration",),
    "live": (
        "test/integration/test_tiers.py",
        "test/integration/test_demo.py::test_every_tier_is_reached_and_survives_kill",
        "test/integration/test_disaggregation.py"
        "::test_handoff_of_any_prompt_length_keeps_the_answer",
    ),
}
DEADLINE_S = {"units": 1800.0, "live": 1800.0}
"""About ten times what they take on two idle cores."""
MAX_FAILURES = {"live": 3}
"""Each may wait for a server; the first ones say what is wrong."""

END_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of one part. ``reasons``: one line for each distinct failure, with its
    number and the first test that it ended."""

    part: str
    passed: int
    failed: int
    seconds: float
    reasons: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return not self.reasons and not self.failed and self.passed > 0


def run(part: str, root: Path, environment: Mapping[str, str]) -> Outcome:
    """Run a part's tests in ``environment``, and end with whatever they started."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compat-") as temporary:
        results = Path(temporary) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", f"--junitxml={results}"]
        if part in MAX_FAILURES:
            command.append(f"--maxfail={MAX_FAILURES[part]}")
        process = subprocess.Popen(
            [*command, *PARTS[part]],
            cwd=root,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=DEADLINE_S[part])
        except subprocess.TimeoutExpired:
            reason = f"did not end within {DEADLINE_S[part]:.0f} s"
            return Outcome(part, 0, 0, time.monotonic() - began, (reason,))
        finally:
            _end(process)
        seconds = time.monotonic() - began
        if not results.exists():
            last = said.strip().splitlines()[-1:] or ["pytest said nothing"]
            return Outcome(part, 0, 0, seconds, (last[0],))
        outcome = outcome_of(part, ElementTree.parse(results).getroot(), seconds)
        if process.returncode in (0, 1):
            return outcome
        reason = f"pytest was stopped, with {process.returncode}"
        return replace(outcome, reasons=(*outcome.reasons, reason))


def _end(process: subprocess.Popen[str]) -> None:
    """Let pytest end its servers, then kill what is left of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcome_of(part: str, results: ElementTree.Element, seconds: float) -> Outcome:
    """Read pytest's report. An error at collection or of a fixture is a failure."""
    passed, failed, reasons = 0, 0, dict[str, list[str]]()
    for case in results.iter("testcase"):
        bad = case.find("failure")
        if bad is None:
            bad = case.find("error")
        if bad is not None:
            failed += 1
            reason = _reason(bad)
            reasons.setdefault(reason, []).append(str(case.get("name")))
        elif case.find("skipped") is None:
            passed += 1
    most_first = sorted(reasons.items(), key=lambda found: -len(found[1]))
    lines = [f"{len(tests)} x {reason} ({tests[0]})" for reason, tests in most_first]
    if not passed and not failed:
        lines.append("no test ran")
    return Outcome(part, passed, failed, seconds, tuple(lines))


def _reason(bad: ElementTree.Element) -> str:
    """The error that a test ended with, in one line. At collection the message says only that."""
    errors = [line[1:].strip() for line in (bad.text or "").splitlines() if line.startswith("E ")]
    message: Sequence[str] = errors or (bad.get("message") or "").splitlines() or ["no reason"]
    return message[0] or "no reason"
