"""``scripts/gpu_report``: everything that only a GPU can answer, in order of worth, in one command.

Each part is a process with a limit, after which it is killed; what it had saved stays.
``--seconds`` bounds all parts together: the last ones get what is left, or nothing.
``report.json``, a table and one archive of all figures, logs and pictures are written after each
part, so a run that is cut off loses nothing. What takes no GPU, weights of a model and
compilations, goes on beside the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_report.disk import choose_disk
from gpu_report.pictures import draw
from gpu_report.table import table

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
GRACE_S = 15.0
"""What a part has for ending what it started, once its time is over."""

BEGUN = "GPU_REPORT_BEGUN"
"""When the script began, in seconds since 1970: unpacking and imports count as well."""

LEAST_S, RESERVE_S = 15.0, 12.0
"""A part that would have less does not begin; and what the last lines and the archive take."""


@dataclass(frozen=True)
class PartOf:
    """A module of this folder, and the seconds it has: in all, quick, and in a rehearsal.

    expected_s: what a quick run took on an H100. after: what goes on
    beside the parts before it and must be over, each a key of ``BESIDE``.
    """

    name: str
    what: str
    deadline_s: int
    quick_s: int
    rehearsal_s: int = 240
    expected_s: int = 0
    after: tuple[str, ...] = ()

    def seconds(self, *, quick: bool, rehearse: bool) -> int:
        return self.rehearsal_s if rehearse else self.quick_s if quick else self.deadline_s


PARTS = (
    PartOf("machine", "what the machine has", 90, 90, expected_s=31),
    PartOf("device_tests", "tests that need a device", 180, 140, expected_s=124),
    PartOf("pod", "mixed batches, a layer", 290, 110, expected_s=47, after=("tiles",)),
    PartOf("server", "the server with tiers, 8B", 400, 250, expected_s=184, after=("model",)),
    PartOf("copies", "pages out of a device's pool and back", 120, 50, expected_s=11),
    PartOf("handoff", "KV from prefill to decode", 120, 50, expected_s=22),
)

FIRST, SECOND = 475, 225
"""Seconds of the two commands of ``docs/gpu.md``, for a machine that is lent for 15 minutes."""

# Programs beside the first parts, and the seconds that each may take.
BESIDE = {
    "model": (["-m", "gpu_report.random_model"], 220),
    "tiles": ([str(BENCHMARKS / "bench_pod_attention.py"), "--check"], 140),
}


@dataclass
class Run:
    """One call of the command. ``work``: its figures and logs, all of which the archive gets."""

    options: argparse.Namespace
    disk: Path
    work: Path
    begin: float = field(default_factory=lambda: float(os.environ.get(BEGUN, time.time())))
    beside: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        spent = time.time() - self.begin
        return float(self.options.seconds or 1e9) - spent - RESERVE_S

    def start_beside(self, parts: list[PartOf]) -> None:
        """Not in a rehearsal, whose model is small and whose kernels are interpreted."""
        if self.options.rehearse:
            return
        for name in dict.fromkeys(name for part in parts for name in part.after):
            command, limit_s = BESIDE[name]
            more = [str(self.disk / "model")] if name == "model" else []
            with (self.work / f"{name}.log").open("wb") as log:
                within = ["timeout", str(limit_s), sys.executable, *command, *more]
                self.beside[name] = _start(within, log)

    def run(self, part: PartOf) -> dict[str, Any]:
        options = self.options
        limit_s = float(part.seconds(quick=options.quick, rehearse=options.rehearse))
        limit_s = min(limit_s, self.left_s)
        for name in part.after:
            if name in self.beside:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.beside[name].wait(max(0.0, self.left_s - LEAST_S))
        limit_s = min(limit_s, self.left_s)
        if limit_s < LEAST_S and not options.rehearse:
            print(f"{part.name}: no time is left", flush=True)
            return {"outcome": "no time was left", "seconds": 0.0, "figures": []}
        print(f"{part.name}: {part.what}, at most {limit_s:.0f} s", flush=True)
        return self._run(part, limit_s)

    def _run(self, part: PartOf, limit_s: float) -> dict[str, Any]:
        options = self.options
        figures, log, servers = (
            self.work / f"{part.name}.{kind}" for kind in ("jsonl", "log", "servers")
        )
        with tempfile.TemporaryDirectory(
            dir=self.disk, prefix=f"{part.name}-", ignore_cleanup_errors=True
        ) as folder:
            command = [sys.executable, "-m", f"gpu_report.{part.name}"]
            command += ["--file", str(figures), "--folder", str(Path(folder).resolve())]
            command += [flag for flag in ("--rehearse", "--quick") if getattr(options, flag[2:])]
            begin = time.monotonic()
            with log.open("wb") as output:
                outcome = _within(command, limit_s, output)
            _kill_groups(servers)
            seconds = time.monotonic() - begin
        lines = figures.read_text().splitlines() if figures.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("}")]
        result: dict[str, Any] = {"outcome": outcome, "seconds": round(seconds, 1), "figures": told}
        if outcome != "ended":
            result["log"] = log.read_text(errors="replace")[-4000:]
        return result

    def save(self, report: dict[str, Any]) -> None:
        """All there is, each file whole at every moment."""
        out: Path = self.options.out
        report["ratios"] = _ratios(report)
        _replace(out / "report.json", json.dumps(report, indent=1) + "\n")
        _replace(out / "report.txt", table(report) + "\n")
        try:
            draw(report, self.work)
        except Exception as error:  # noqa: BLE001 - a picture must not end the run
            (self.work / "pictures.log").write_text(f"{type(error).__name__}: {error}\n")
        packed = out / ".report.tgz"
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(self.work, "report")
            archive.add(out / "report.json", "report/report.json")
        packed.rename(out / "report.tgz")


def main(arguments: list[str] | None = None) -> int:
    """0 if every part ended by itself, with figures or with the reason why there are none."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_report", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds, 13 minutes")
    parser.add_argument("--seconds", type=int, metavar="N", help="bound of all parts together")
    parser.add_argument("--rehearse", action="store_true", help="the same programs without a GPU")
    parser.add_argument("--only", choices=[part.name for part in PARTS], action="append")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder (gpu_report)")
    parser.add_argument(
        "--disk", type=Path, help="folder on the disk of the tiers; default: the first with room"
    )
    options = parser.parse_args(arguments)
    if options.seconds is not None and options.seconds < RESERVE_S + LEAST_S:
        parser.error(f"--seconds {options.seconds}: no part ends in that time; 475 is enough.")
    device = _device()
    if device is None and not options.rehearse:
        print(
            "scripts/gpu_report: torch sees no CUDA device here; --rehearse runs the programs.",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    report: dict[str, Any] = {
        "device": device or "none: a rehearsal, whose figures say nothing",
        "date": time.strftime("%Y-%m-%d"),
        "versions": _versions(),
        "quick": options.quick,
        "rehearsal": options.rehearse,
        "parts": {},
    }
    disk = options.disk or (options.out if options.rehearse else choose_disk())
    disk.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as work:
        run = Run(options, disk.resolve(), Path(work))
        try:
            run.start_beside(parts)
            for part in parts:
                report["parts"][part.name] = run.run(part)
                run.save(report)
        finally:
            for process in run.beside.values():
                _end(process)
    print(table(report))
    print(f"\n{options.out / 'report.tgz'}: figures, logs and pictures")
    outcomes = [part["outcome"] for part in report["parts"].values()]
    return 0 if all(outcome == "ended" for outcome in outcomes) else 1


def _ratios(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By name, as every result file has them."""
    figures = [one for part in report["parts"].values() for one in part["figures"]]
    return {
        one["name"]: {key: one[key] for key in ("value", "min", "max", "n") if key in one}
        for one in figures
        if one.get("unit") == "ratio"
    }


def _replace(path: Path, text: str) -> None:
    written = path.with_name(f".{path.name}")
    written.write_text(text)
    written.rename(path)


def _start(command: list[str], output: Any) -> subprocess.Popen[bytes]:
    paths = [str(BENCHMARKS), str(ROOT / "python"), str(ROOT / "kernels")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )


def _within(command: list[str], limit_s: float, output: Any) -> str:
    """Run a process and what it starts; all of it is gone afterwards."""
    process = _start(command, output)
    try:
        code = process.wait(limit_s)
        return "ended" if code == 0 else f"failed with {code}"
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # its servers have sessions of their own, which it ends
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kill_groups(file: Path) -> None:
    """Servers of a part that did not end them itself: they hold the device's memory."""
    pids = file.read_text().split() if file.exists() else []
    for pid in map(int, pids):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    file.unlink(missing_ok=True)


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


if __name__ == "__main__":
    sys.exit(main())
