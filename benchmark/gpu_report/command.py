"""``scripts/gpu_report``: everything that only a GPU can answer, in order of worth, in one command.

Each part is a process with a deadline, after which it is killed; what it had saved stays. All
together end within 20 minutes. ``report.json`` is written after each part, a table and a picture a
part (``PART.svg``) at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_report.pictures import draw

__all__ = ["PARTS", "PartOf", "main"]

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
GRACE_S = 15.0
"""What a part has for ending what it started, once its time is over."""


@dataclass(frozen=True)
class PartOf:
    """A module of this folder, and the seconds it has: in all, quick, and in a rehearsal."""

    name: str
    what: str
    deadline_s: int
    quick_s: int
    rehearsal_s: int = 240

    def seconds(self, *, quick: bool, rehearse: bool) -> int:
        return self.rehearsal_s if rehearse else self.quick_s if quick else self.deadline_s


PARTS = (
    PartOf("device_tests", "tests that need a device", 180, 120),
    PartOf("pod", "mixed batches, one attention layer", 290, 120),
    PartOf("copies", "pages out of a device's pool and back", 120, 60),
    PartOf("handoff", "KV from prefill to decode", 120, 60),
    PartOf("server", "the server with tiers, 8B", 400, 240),
)


def main(arguments: list[str] | None = None) -> int:
    """0 if every part ended by itself, with figures or with the reason why there are none."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_report", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds, 10 minutes")
    parser.add_argument("--rehearse", action="store_true", help="the same programs without a GPU")
    parser.add_argument("--only", choices=[part.name for part in PARTS], action="append")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder (gpu_report)")
    parser.add_argument("--disk", type=Path, help="folder on the disk of the tiers; default: OUT")
    options = parser.parse_args(arguments)
    device = _device()
    if device is None and not options.rehearse:
        print(
            "scripts/gpu_report: torch sees no CUDA device here; --rehearse runs the programs.",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "device": device or "none: a rehearsal, whose figures say nothing",
        "date": time.strftime("%Y-%m-%d"),
        "versions": _versions(),
        "quick": options.quick,
        "rehearsal": options.rehearse,
        "parts": {},
    }
    for part in PARTS:
        if not options.only or part.name in options.only:
            report["parts"][part.name] = _run(part, options)
            (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(_table(report))
    try:
        print("\npictures:", *draw(report, options.out))
    except ImportError:
        print("\nno pictures: matplotlib is not installed here; report.json has all figures")
    outcomes = [part["outcome"] for part in report["parts"].values()]
    return 0 if all(outcome == "ended" for outcome in outcomes) else 1


def _run(part: PartOf, options: argparse.Namespace) -> dict[str, Any]:
    deadline_s = part.seconds(quick=options.quick, rehearse=options.rehearse)
    print(f"{part.name}: {part.what}, at most {deadline_s} s", flush=True)
    figures, log = (options.out / f"{part.name}.{kind}" for kind in ("jsonl", "log"))
    for file in (figures, log):
        file.unlink(missing_ok=True)
    disk = options.disk or options.out
    with tempfile.TemporaryDirectory(dir=disk, prefix=f"{part.name}-") as folder:
        command = [sys.executable, "-m", f"gpu_report.{part.name}"]
        command += ["--file", str(figures.resolve()), "--folder", str(Path(folder).resolve())]
        command += [flag for flag in ("--rehearse", "--quick") if getattr(options, flag[2:])]
        begin = time.monotonic()
        with log.open("wb") as output:
            outcome = _within(command, deadline_s, output)
        seconds = time.monotonic() - begin
    lines = figures.read_text().splitlines() if figures.exists() else []
    told = [json.loads(line) for line in lines if line.endswith("}")]
    result: dict[str, Any] = {"outcome": outcome, "seconds": round(seconds, 1), "figures": told}
    if outcome != "ended":
        result["log"] = log.read_text(errors="replace")[-4000:]
    return result


def _within(command: list[str], deadline_s: float, output: Any) -> str:
    """Run a process and what it starts; all of it is gone afterwards."""
    paths = [str(BENCHMARKS), str(ROOT / "python"), str(ROOT / "kernels")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        code = process.wait(deadline_s)
        return "ended" if code == 0 else f"failed with {code}"
    except subprocess.TimeoutExpired:
        return f"stopped after {deadline_s:.0f} s"
    finally:
        process.terminate()  # its servers have sessions of their own, which it ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _device() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _versions() -> dict[str, str]:
    import importlib.metadata

    found = {"python": sys.version.split()[0]}
    for name in (
        "torch",
        "triton",
        "sglang",
        "sglang-kernel",
        "sglang-tiered",
        "flashinfer-python",
    ):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _table(report: dict[str, Any]) -> str:
    lines = [f"\n{report['device']}, {report['date']}, torch {report['versions']['torch']}"]
    for name, part in report["parts"].items():
        lines.append(f"\n{name}: {part['outcome']}, {part['seconds']:.0f} s")
        for figure in part["figures"]:
            if "skipped" in figure:
                lines.append(f"  {figure['name']:44s} skipped: {figure['skipped'][:120]}")
                continue
            spread = f"  ({figure['min']:.4g} to {figure['max']:.4g})" if "min" in figure else ""
            value = f"{figure['value']:.4g} {figure['unit']}"
            lines.append(f"  {figure['name']:44s} {value}{spread}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
