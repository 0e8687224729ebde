"""The object tier beside plain ``obstore``: reads, uploads, requests and CPU time.

Both sides take turns in one process, with the same objects and as many
requests under way. Then a server resumes conversations of 4,000 tokens that another one opened. No
figure is printed when what came back differs from what was stored.
``README.md`` in this folder says what each figure means.

    python benchmark/bench_object.py [--quick] [--directory DIR] [--no-s3] [--no-servers]
                                     [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from object_bench import resume
from object_bench.places import directory_place, has_server, s3_place
from object_bench.sides import (
    Plain,
    Samples,
    engine_load,
    engine_store,
    make_run,
    object_spans,
    open_engine,
)
from sglang_tiered.tools.machine import describe_machine, describe_versions
from storage_bench.figures import DifferentBytesError, Report, quotients, size_name

if TYPE_CHECKING:
    from object_bench.places import Place

PAGE_SIZES = (256 << 10, 1 << 20, 8 << 20)


def measure_place(place: Place, num_bytes: int, num_rounds: int, report: Report) -> None:
    for page_bytes in PAGE_SIZES:
        name = f"{place.name}_{size_name(page_bytes)}"
        sides = {side: Samples() for side in ("engine", "obstore", "obstore and a copy")}
        _measure_reads(place, page_bytes, num_bytes, num_rounds, sides)
        for other, figure in (("obstore", "ranged"), ("obstore and a copy", "ranged_copied")):
            pair = {"engine": sides["engine"], other: sides[other]}
            wanted = "0.90" if figure == "ranged" else ""
            _add(report, f"{figure}_over_obstore_{name}", pair, num_bytes, wanted)
        sides = {side: Samples() for side in ("engine", "obstore")}
        _measure_writes(place, page_bytes, num_bytes, num_rounds, sides)
        _add(report, f"upload_over_obstore_{name}", sides, num_bytes, "")


def _measure_reads(
    place: Place, page_bytes: int, num_bytes: int, num_rounds: int, sides: dict[str, Samples]
) -> None:
    """The first turn of each side, which connects and fills the page cache, is not counted."""
    folder = f"reads-{page_bytes}"
    url, store = place.folder(folder)
    source = make_run(1, page_bytes, num_bytes)
    target = make_run(1, page_bytes, num_bytes)
    engine, plain = open_engine(url), Plain(store)
    try:
        engine_store(engine, source, None)
        spans = object_spans(store)
        for number in range(num_rounds + 1):
            ours, theirs, copied = sides.values() if number else (None, None, None)
            turns = [
                lambda samples=ours: engine_load(engine, source, target, samples),
                lambda samples=theirs: plain.load(spans, num_bytes, None, samples),
                lambda samples=copied: plain.load(spans, num_bytes, target, samples),
            ]
            for turn in turns if number % 2 else reversed(turns):
                turn()
    finally:
        engine.close()
        plain.close()
        place.remove(folder)


def _measure_writes(
    place: Place, page_bytes: int, num_bytes: int, num_rounds: int, sides: dict[str, Samples]
) -> None:
    for number in range(num_rounds + 1):
        folder = f"writes-{page_bytes}-{number}"
        url, store = place.folder(folder)
        run = make_run(number + 2, page_bytes, num_bytes)
        engine, plain = open_engine(url), Plain(store)
        ours, theirs = sides.values() if number else (None, None)
        turns = [
            lambda engine=engine, run=run, samples=ours: engine_store(engine, run, samples),
            lambda plain=plain, run=run, folder=folder, samples=theirs: plain.store(
                run, place.directory(folder), samples
            ),
        ]
        try:
            for turn in turns if number % 2 else reversed(turns):
                turn()
        finally:
            engine.close()
            plain.close()
            place.remove(folder)


def _add(
    report: Report,
    name: str,
    sides: dict[str, Samples],
    num_bytes: int,
    wanted: str,
) -> None:
    """The second side's seconds over the first's."""
    ours, theirs = sides.values()
    ratio = quotients(theirs.seconds, ours.seconds)
    size = num_bytes / 1e9
    beside = []
    for side, samples in sides.items():
        speeds = [size / seconds for seconds in samples.seconds]
        cpu = statistics.median(samples.cpu_s) / size
        requests = statistics.median(samples.requests) / size
        beside.append(
            f"{side} {statistics.median(speeds):.2f} GB/s "
            f"({min(speeds):.2f} to {max(speeds):.2f}), {cpu:.2f} CPU s/GB, "
            f"{requests:,.0f} requests/GB"
        )
        report.raw[f"{name}: {side}"] = vars(samples)
    report.add(name, ratio, wanted=wanted, beside="; ".join(beside))


def measure_resume(root: Path, num_rounds: int, report: Report) -> None:
    model = resume.make_model(root / "model")
    shared = ("--tier-object-url", str(root / "objects"))
    found = resume.measure(model, root / "by-object", num_rounds, tier="object", shared=shared)
    resume.add("resume_ttft_over_recompute", found, report)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds")
    parser.add_argument("--directory", type=Path, help="where objects of the directory go")
    parser.add_argument("--no-s3", action="store_true", help="a directory only")
    parser.add_argument("--no-servers", action="store_true", help="the engine only")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    num_rounds = 5 if options.quick else 9
    num_bytes = (64 if options.quick else 256) << 20
    report = Report()
    report.settings |= {
        "quick": options.quick,
        "rounds": num_rounds,
        "bytes_per_round": num_bytes,
        "page_cache": "warm on both sides",
    }
    try:
        with contextlib.ExitStack() as held:
            root = held.enter_context(tempfile.TemporaryDirectory(dir=options.directory))
            measure_place(directory_place(Path(root)), num_bytes, num_rounds, report)
            if not options.no_s3 and has_server():
                place = held.enter_context(s3_place())
                measure_place(place, num_bytes, num_rounds, report)
            elif not options.no_s3:
                report.note("S3 was left out: moto is not installed.")
            if not options.no_servers:
                measure_resume(Path(root), num_rounds, report)
    except DifferentBytesError as error:
        print(f"Nothing to compare: {error}.", file=sys.stderr)
        return 1
    console = Console(width=150)
    console.print(report.table())
    for note in report.notes:
        console.print(note)
    if options.json:
        result = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": report.settings,
            "ratios": report.ratios,
            "raw": report.raw,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
