"""The NVMe tier beside the raw device, SGLang's ``file`` backend and LMCache's local backends.

Both sides of every figure run in one process or side by side, in turn, with a cold page cache; no
figure is printed when what came back differs from what was stored. ``README.md`` in this folder
says what each figure means.

    python benchmark/bench_storage.py [--quick] [--only SECTION,...] [--directory DIR]
                                      [--json FILE] [--trace FILE [--allow-dropped]]
                                      [--lmcache-python PYTHON]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_tiered.errors import TraceError
from sglang_tiered.tools.machine import describe_machine, describe_versions
from storage_bench import (
    device_section,
    idle_section,
    latency_section,
    opening_section,
    peers_section,
    trace_section,
)
from storage_bench.figures import DifferentBytesError, Report
from storage_bench.raw_device import RawDevice
from storage_bench.setting import Setting
from storage_bench.workspace import UnusableDirectoryError, Workspace, default_directory

if TYPE_CHECKING:
    from types import ModuleType

# In the order they run.
SECTIONS: dict[str, ModuleType] = {
    "device": device_section,
    "peers": peers_section,
    "opening": opening_section,
    "latency": latency_section,
    "idle": idle_section,
    "trace": trace_section,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer bytes, pages and samples")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(SECTIONS),
        metavar="SECTION,...",
        help=f"run some sections only: {', '.join(SECTIONS)}",
    )
    parser.add_argument("--directory", type=Path, help="where to write; a folder on a real disk")
    parser.add_argument("--allow-tmpfs", action="store_true", help="for trying the script out")
    parser.add_argument("--trace", type=Path, help="a trace of any form to replay")
    parser.add_argument(
        "--allow-dropped",
        action="store_true",
        help="use a trace although more than 10%% of its rows cannot be used",
    )
    parser.add_argument(
        "--lmcache-python", type=Path, help="a Python that can import lmcache, to compare with it"
    )
    options = parser.parse_args()
    if options.trace and not options.trace.is_file():
        parser.error(f"{options.trace} is not a file")
    if unknown := set(options.only) - SECTIONS.keys():
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return options


def measure(options: argparse.Namespace, workspace: Workspace) -> Report:
    sections = [module for name, module in SECTIONS.items() if name in options.only]
    workspace.check_space(
        max(section.needed_bytes(options.quick) for section in sections),
        max(section.num_files(options.quick) for section in sections),
    )
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    report = Report()
    with workspace, Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        setting = Setting(
            quick=options.quick,
            num_samples=5 if options.quick else 7,
            workspace=workspace,
            raw_device=RawDevice(workspace.root),
            report=report,
            progress=progress,
            lmcache_python=options.lmcache_python,
            trace=options.trace,
            allow_dropped=options.allow_dropped,
        )
        report.settings |= {
            "quick": options.quick,
            "sections": options.only,
            "samples": setting.num_samples,
            "filesystem": workspace.filesystem,
            "page_cache": workspace.page_cache,
        }
        for section in sections:
            section.run(setting)
    return report


def document(report: Report) -> dict[str, Any]:
    return {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": report.settings,
        "ratios": report.ratios,
        "raw": report.raw,
    }


def main() -> int:
    options = parse_arguments()
    # Asked to end by a signal, a run shall remove its gigabytes as it does on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        workspace = Workspace(
            options.directory or default_directory(), allow_tmpfs=options.allow_tmpfs
        )
        report = measure(options, workspace)
    except (TraceError, UnusableDirectoryError) as error:
        print(error, file=sys.stderr)
        return 1
    except DifferentBytesError as error:
        print(f"Nothing to compare: {error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; what was written is removed.", file=sys.stderr)
        return 130
    console = Console(width=130)
    console.print(report.table())
    for note in report.notes:
        console.print(note)
    if options.json:
        options.json.write_text(json.dumps(document(report), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
