"""(a) The tests that need a device: ``pytest -m gpu``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from gpu_report.figures import Part, SkippedError, run_part

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("test/gpu", "test/kernels/page_copy", "test/kernels/pod_attention/test_on_gpu.py")


def run(part: Part) -> None:
    """Without a device, as in a rehearsal, every one of them must be skipped."""
    missing = [
        name
        for name in ("pytest", "pytest_timeout", "hypothesis")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise SkippedError(f"{', '.join(missing)} not installed")
    result = part.folder / "tests.xml"
    places = PLACES[1:] if part.quick and not part.rehearse else PLACES
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junit-xml={result}"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *places],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if not result.exists():
        raise SkippedError(f"pytest gave no result: {(done.stdout + done.stderr)[-300:]}")
    suite = ElementTree.parse(result).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    part.save("device_tests_passed", total - skipped - failed, "tests")
    part.save("device_tests_failed", failed, "tests", log=done.stdout[-4000:] if failed else "")
    part.save("device_tests_skipped", skipped, "tests")


if __name__ == "__main__":
    run_part("device_tests", run)
