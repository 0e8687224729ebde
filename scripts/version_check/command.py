"""``scripts/compat VERSION...``: whether this package could run on other versions of SGLang."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.config import cache_directory
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.compat import CHECKED_VERSION, SUPPORTED_VERSIONS
from sglang_tiered.tools.terminal import Parser, note, print_table, run_program
from version_check import overlay, smoke

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
SEAMS_DEADLINE_S = 300.0
PARTS = ("signatures", *smoke.PARTS)
SHOWN_CHARACTERS = 160
SHOWN_FAILURES = 8


@dataclass(frozen=True)
class Check:
    """What was found out about one version. ``seams``: as ``integration.seams`` prints them;
    ``plugin``: why it does not load, empty if it does."""

    overlay: overlay.Overlay
    seams: tuple[dict[str, str], ...]
    plugin: str
    outcomes: tuple[smoke.Outcome, ...]

    @property
    def is_good(self) -> bool:
        return (
            not self.plugin
            and not self.with_status("changed", "missing")
            and all(outcome.is_good for outcome in self.outcomes)
        )

    def with_status(self, *statuses: str) -> list[dict[str, str]]:
        return [seam for seam in self.seams if seam["status"] in statuses]


def main() -> int:
    return run_program(lambda: run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    parser = Parser(prog="scripts/compat", description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="as PyPI writes it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found there")
    parser.add_argument(
        "--only",
        action="append",
        choices=PARTS,
        help="leave the other parts out; repeat it for several. A version passes by all parts only",
    )
    parser.add_argument(
        "--with",
        dest="extra",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="install a requirement of that SGLang that .venv has in no version; repeatable",
    )
    options = parser.parse_args(arguments)
    versions = [overlay.checked_version(text) for text in options.versions]
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json} is in no folder; name one that exists.")
    # All of them before the first check, so that a version that PyPI lacks costs nothing.
    cache = cache_directory() / "sglang-tiered" / "compat"
    overlays = [overlay.make(version, cache, options.extra) for version in versions]
    checks = [check(found, options.only or PARTS) for found in overlays]
    show(checks)
    if options.json is not None:
        options.json.write_text(json.dumps(report_of(checks), indent=2) + "\n", encoding="utf-8")
    return 0 if all(found.is_good for found in checks) else 1


def check(found: overlay.Overlay, parts: Sequence[str]) -> Check:
    """Check one version. The signatures always: they say why anything else fails."""
    version = found.version
    environment = found.environment(os.environ)
    if version not in SUPPORTED_VERSIONS:
        environment[CHECKED_VERSION] = version
    note(f"sglang {version}: signatures")
    report = seams_of(version, environment)
    outcomes = []
    for part in smoke.PARTS:
        if part in parts:
            note(f"sglang {version}: {part} (minutes)")
            outcomes.append(smoke.run(part, ROOT, environment))
    return Check(found, tuple(report["seams"]), report["plugin"], tuple(outcomes))


def seams_of(version: str, environment: dict[str, str]) -> dict[str, Any]:
    """Compare every seam, in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sglang_tiered.integration.seams"],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=SEAMS_DEADLINE_S,
        )
        report: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"sglang {version} could not be imported in {SEAMS_DEADLINE_S:.0f} s; try again on an "
            "idle machine."
        ) from None
    except json.JSONDecodeError:
        last = done.stderr.strip().splitlines()[-1:] or ["no word"]
        return {"seams": [], "plugin": f"the comparison ended with {last[0]}"}
    assert report["version"] == version, "the folder is not before the environment"
    return report


def show(checks: Sequence[Check]) -> None:
    """Print a row for each version, and below it everything that is not as it should be."""
    rows = []
    for found in checks:
        row = [found.overlay.version]
        row += [str(len(found.with_status(name))) for name in ("ok", "changed", "missing")]
        row += [str(len(found.with_status("unchecked"))), "no" if found.plugin else "yes"]
        for part in smoke.PARTS:
            row.append(next((_figures(one) for one in found.outcomes if one.part == part), "-"))
        is_whole = len(found.outcomes) == len(smoke.PARTS)
        row.append("no" if not found.is_good else "yes" if is_whole else "so far")
        rows.append(row)
    columns = ("sglang", "signatures ok", "changed", "missing", "unchecked", "plugin loads")
    print_table((*columns, *smoke.PARTS, "all good"), rows)
    reasons = [
        (found.overlay.version, what, _short(reason))
        for found in checks
        for what, reason in reasons_of(found)
    ]
    if reasons:
        print()
        print_table(("sglang", "what", "reason"), reasons, left=3)


def _figures(outcome: smoke.Outcome) -> str:
    word = "passed" if outcome.is_good else "failed"
    return f"{word}: {outcome.passed} of {outcome.passed + outcome.failed}, {outcome.seconds:.0f} s"


def _short(text: str) -> str:
    """A reason as a table shows it; ``--json`` has all of it."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def reasons_of(found: Check) -> list[tuple[str, str]]:
    """Everything that was not met, by what it is about."""
    reasons = [
        (seam["status"], _of_seam(seam))
        for seam in found.with_status("changed", "missing", "unchecked")
    ]
    if found.plugin:
        reasons.append(("plugin", found.plugin))
    for outcome in found.outcomes:
        reasons += [(outcome.part, reason) for reason in outcome.reasons[:SHOWN_FAILURES]]
        if len(outcome.reasons) > SHOWN_FAILURES:
            left = len(outcome.reasons) - SHOWN_FAILURES
            reasons.append((outcome.part, f"and {left} other failures, which --json has"))
    reasons += [
        ("requirement", str(unmet))
        for unmet in found.overlay.unmet
        if unmet.treatment != "left out"
    ]
    return reasons


def _of_seam(seam: dict[str, str]) -> str:
    if seam["status"] == "changed":
        return f"{seam['name']}: expected {seam['expected']}, there is {seam['found']}"
    return f"{seam['name']}: {seam['found']}"


def report_of(checks: Sequence[Check]) -> dict[str, Any]:
    """What ``--json`` writes."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "supported": list(SUPPORTED_VERSIONS),
        "versions": [
            {
                "version": found.overlay.version,
                "good": found.is_good,
                "plugin": found.plugin,
                "seams": list(found.seams),
                "smoke": [asdict(outcome) for outcome in found.outcomes],
                "requirements": [asdict(unmet) for unmet in found.overlay.unmet],
            }
            for found in checks
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
