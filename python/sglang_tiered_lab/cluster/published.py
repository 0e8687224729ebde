"""``published``: the settings of DistServe and Splitwise here, beside their authors' figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError
from sglang_tiered.tools.terminal import print_lines, print_table

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write all figures there")
    parser.add_argument("--quick", action="store_true", help="fewer requests")


def run(options: argparse.Namespace) -> int:
    """Simulate and print. Returns the exit code."""
    from sglang_tiered_lab.cluster.published_settings import distserve, splitwise

    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json} cannot be written: its folder is missing.")
    count = 200 if options.quick else 1000
    tables = {
        "DistServe: requests a second and GPU": list(distserve(count)),
        "Splitwise: throughput over H100 that do both, for the same money": list(splitwise(count)),
    }
    for title, rows in tables.items():
        shown = [
            (
                row.what,
                "-" if math.isnan(row.published) else f"{row.published:g}",
                f"{row.modelled:.2f}",
            )
            for row in rows
        ]
        print_lines([title, ""])
        print_table(("setting", "published", "modelled"), shown)
        print_lines([""])
    if options.json is not None:
        raw = {
            title: [
                {"what": row.what, "modelled": row.modelled}
                | ({} if math.isnan(row.published) else {"published": row.published})
                for row in rows
            ]
            for title, rows in tables.items()
        }
        options.json.write_text(json.dumps({"raw": raw}, indent=2) + "\n")
    return 0
