"""Four systems serve the same requests: stock SGLang, HiCache (host; host and files), and tiers.

All run the same model on the same cores, each idle while another is asked, in alternating order.
No ratio is printed for a scenario unless all systems gave the same answers. The parts of
``serving_bench`` say what each scenario is, and ``README.md`` whom the rules favour.

    python benchmark/bench_serving.py [--quick] [--only SCENARIO,...] [--systems NAME,...]
                                      [--shape SHAPE] [--new-tokens NUMBER]
                                      [--directory DIR] [--json FILE] [--plots DIR] [--trace FILE]
                                      [--sharegpt FILE] [--allow-dropped]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from serving_bench import (
    balanced,
    disk_added,
    hinted,
    many,
    noreuse,
    regret,
    replays,
    returning,
    same_turn,
    slow_disk,
    users,
    write_pressure,
)
from serving_bench.bench import Bench
from serving_bench.client import RequestFailedError
from serving_bench.plots import draw_plots, draw_users
from serving_bench.setting import FULL, PAGE_SIZE, QUICK, TINY, Setting
from serving_bench.systems import ENVIRONMENT, SYSTEMS, UnequalSystemsError
from serving_bench.throttle import NoThrottleError, find_throttle
from sglang_tiered.errors import TraceError
from sglang_tiered.tools.machine import describe_machine, describe_versions
from sglang_tiered_lab.trace.inputs import Input
from sglang_tiered_lab.trace.source import DATA_VARIABLE
from storage_bench.figures import Report
from storage_bench.workspace import UnusableDirectoryError, Workspace, default_directory

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
MOONCAKE_FILE = Path("mooncake/conversation.jsonl")  # below $SGLANG_TIERED_DATA
INTERRUPTED = "Interrupted; servers are stopped and what was written is removed."
REFUSALS = (
    NoThrottleError,
    RequestFailedError,
    TraceError,
    UnequalSystemsError,
    UnusableDirectoryError,
)

# In the order they run.
SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "returning": returning.run,
    "noreuse": noreuse.run,
    "device": noreuse.run_device,
    "write_pressure": write_pressure.run,
    "many": many.run,
    "sharegpt": replays.run_sharegpt,
    "mooncake": replays.run_mooncake,
    # What a system has learnt of a slow disk shall not weigh on others, so these come last.
    "slow_disk": slow_disk.run,
    "disk_added": disk_added.run,
    # These have servers of their own, on a disk that is paced.
    "balanced": balanced.run,
    "users": users.run,
    "regret": regret.run,
    "hinted": hinted.run,
    "same_turn": same_turn.run,  # five servers of its own
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer rounds")
    parser.add_argument("--tiny", action="store_true", help="for trying the script out")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        metavar="SCENARIO,...",
        help=f"run some scenarios only: {', '.join(SCENARIOS)}",
    )
    parser.add_argument(
        "--systems",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help=f"compare these: {', '.join(SYSTEMS)}; tiered is always one (default: all of them, "
        "without hicache-host with --quick)",
    )
    parser.add_argument("--shape", help="another model of scripts/make_demo_model.py: 8m to 85m")
    parser.add_argument(
        "--new-tokens",
        type=int,
        metavar="NUMBER",
        help=f"tokens a returning turn adds (default: {FULL.num_new})",
    )
    parser.add_argument(
        "--neighbour",
        type=int,
        default=0,
        metavar="CORES",
        help="run `device` and `sharegpt` also beside processes that keep so many cores busy",
    )
    parser.add_argument("--directory", type=Path, help="where to write; a folder on a real disk")
    parser.add_argument("--allow-tmpfs", action="store_true", help="for trying the script out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--plots", type=Path, help="write PNG plots to this folder (needs matplotlib)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        help="a trace of any form for `mooncake`; by default mooncake/conversation.jsonl in "
        f"${DATA_VARIABLE}",
    )
    parser.add_argument(
        "--sharegpt",
        type=Path,
        metavar="FILE",
        help="a file of conversations of any form, as it is downloaded, for `sharegpt`; by default "
        "they are made up from ShareGPT's published statistics",
    )
    parser.add_argument(
        "--allow-dropped",
        action="store_true",
        help="use a trace although more than 10%% of its rows cannot be used",
    )
    options = parser.parse_args()
    if unknown := set(options.only) - SCENARIOS.keys():
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    setting = chosen_setting(options)
    options.systems = list(setting.systems) if options.systems is None else options.systems
    if unknown := set(options.systems) - set(SYSTEMS):
        parser.error(f"no system {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    if options.plots and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plots needs matplotlib: pip install 'sglang-tiered[plot]'")
    if options.new_tokens is not None and not 1 <= options.new_tokens <= setting.num_new:
        parser.error(
            f"--new-tokens {options.new_tokens} is not between 1 and {setting.num_new}; with more "
            "the conversations of `device` would outgrow the device"
        )
    if not 0 <= options.neighbour <= (cores := os.cpu_count() or 1):
        parser.error(f"--neighbour {options.neighbour} is not between 0 and {cores}")
    if "tiered" not in options.systems or len(options.systems) < 2:
        parser.error("--systems must name tiered and at least one other to compare it with")
    return options


def chosen_setting(options: argparse.Namespace) -> Setting:
    """The sizes asked for, before single ones are changed."""
    return TINY if options.tiny else QUICK if options.quick else FULL


def make_model(shape: str, folder: Path) -> Path:
    """The random model of that size. Exits as its maker does when there is no such shape."""
    model = folder / "model"
    maker = ROOT / "scripts" / "make_demo_model.py"
    made = subprocess.run(
        [sys.executable, str(maker), str(model), "--shape", shape],
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        raise UnusableDirectoryError(made.stderr.strip().splitlines()[-1])
    return model


def kv_bytes_per_token(model: Path) -> int:
    """Bytes of K and V of one token in float32, by the model's own configuration."""
    config = json.loads((model / "config.json").read_text())
    width: int = config["num_key_value_heads"] * config["head_dim"]
    return 2 * config["num_hidden_layers"] * width * 4


def measure(options: argparse.Namespace, workspace: Workspace) -> Bench:
    setting = chosen_setting(options)
    if options.shape:
        setting = dataclasses.replace(setting, shape=options.shape)
    if options.new_tokens:
        setting = dataclasses.replace(setting, num_new=options.new_tokens)
    report = Report()
    scenarios = check_scenarios(options, setting, report)
    with workspace:
        model = make_model(setting.shape, workspace.root)
        per_token = kv_bytes_per_token(model)
        setting = setting.with_nvme(per_token)
        largest = max(setting.main.nvme_bytes, setting.crowd.geometry.nvme_bytes)
        workspace.check_space(4 * largest + (1 << 30), 4 * _num_pages(setting))
        bench = Bench(
            setting=setting,
            workspace=workspace,
            report=report,
            model=model,
            kv_bytes_per_token=per_token,
            names=[name for name in SYSTEMS if name in options.systems],
            trace=options.trace or MOONCAKE_FILE,
            sharegpt=options.sharegpt,
            allow_dropped=options.allow_dropped,
            neighbour=options.neighbour,
        )
        report.settings |= {
            **dataclasses.asdict(setting),
            "scenarios": scenarios,
            "systems": bench.names,
            "neighbour_cores": options.neighbour,
            "page_size": PAGE_SIZE,
            "kv_bytes_per_token": per_token,
            "host_tokens": setting.main.host_tokens,
            "filesystem": workspace.filesystem,
            "page_cache": workspace.page_cache,
            "dtype": "float32",
            "metrics": "on in every system",
            "environment": ENVIRONMENT,
        }
        try:
            for name in scenarios:
                start_s = time.perf_counter()
                SCENARIOS[name](bench)
                report.raw.setdefault(name, {})["wall_s"] = time.perf_counter() - start_s
                report.raw["occupancy"] = bench.occupancy
                write_json(options.json, report)
        except RequestFailedError as error:
            # What was measured before it stands; servers that fail requests measure nothing more.
            bench.failures.append(str(error))
        except KeyboardInterrupt:
            bench.failures.append(INTERRUPTED)
            bench.exit_code = 130
        finally:
            bench.close_main_fleet()
    return bench


def check_scenarios(options: argparse.Namespace, setting: Setting, report: Report) -> list[str]:
    """What will run. What cannot is refused where it was asked for by name, else left out with a
    note; nothing has been started yet. Raises ``NoThrottleError`` or ``TraceError``."""
    scenarios = options.only or list(SCENARIOS)

    def check(name: str, check: Callable[[], object]) -> None:
        if name not in scenarios:
            return
        try:
            check()
        except (NoThrottleError, TraceError) as error:
            if options.only:
                raise
            scenarios.remove(name)
            report.note(f"{name} was left out: {error}")

    check("slow_disk", lambda: find_throttle(options.directory or default_directory()))
    check("mooncake", lambda: next(Input(options.trace or MOONCAKE_FILE).stream()))
    if options.sharegpt is not None:
        check(
            "sharegpt",
            lambda: replays.check_sharegpt(
                options.sharegpt,
                setting,
                has_neighbour=options.neighbour > 0,
                allow_dropped=options.allow_dropped,
            ),
        )
    return scenarios


def _num_pages(setting: Setting) -> int:
    return int(setting.main.memory_tokens * setting.working_set / PAGE_SIZE) + 10_000


def system_table(scenario: str, raw: dict[str, Any]) -> Table:
    """One row per system: what was measured, before anything is divided."""
    columns = ("TTFT mean", "p50", "p90", "p99", "ITL p50", "p99", "latency p50", "p99")
    table = Table(scenario, *columns, "hit rate", "device", "host", "NVMe", "written", "WA")
    keys = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
    for name, figures in raw["systems"].items():
        table.add_row(
            name,
            *(
                f"{figures[key] * 1e3:.0f}" if key in figures else ""
                for key in (*keys, "latency_p50_s", "latency_p99_s")
            ),
            f"{figures['hit_rate']:.0%}",
            *(f"{figures[f'hit_tokens_{tier}']:,.0f}" for tier in ("device", "host", "storage")),
            f"{figures['written_bytes'] / 1e6:,.0f} MB" if "written_bytes" in figures else "",
            f"{figures['write_amplification']:.2f}" if "write_amplification" in figures else "",
        )
    return table


def document(report: Report) -> dict[str, Any]:
    return {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": report.settings,
        "ratios": report.ratios,
        "raw": report.raw,
    }


def write_json(path: Path | None, report: Report) -> None:
    """After each scenario and at the end, so that nothing that took minutes is lost."""
    if path:
        path.write_text(json.dumps(document(report), separators=(",", ":")) + "\n")


def main() -> int:
    options = parse_arguments()
    # Asked to end by a signal, a run shall stop its servers and remove its files as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # SGLang calls ninja by name, and what installs it is this environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    try:
        workspace = Workspace(
            options.directory or default_directory(),
            allow_tmpfs=options.allow_tmpfs,
            prefix="bench-serving-",
        )
        bench = measure(options, workspace)
    except REFUSALS as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 130
    report = bench.report
    console = Console(width=170)
    for name in report.settings["scenarios"]:
        if report.raw.get(name, {}).get("systems"):
            console.print(system_table(f"{name}, ms and tokens", report.raw[name]))
    console.print(report.table())
    for note in (*report.notes, *bench.failures):
        console.print(note)
    write_json(options.json, report)
    if options.plots:
        drawn = draw_plots(options.plots, bench.outcomes, bench.occupancy)
        if points := report.raw.get("users", {}).get("points"):
            drawn.append(draw_users(options.plots, points))
        for path in drawn:
            print(path, file=sys.stderr)
    return bench.exit_code or (1 if bench.failures else 0)


if __name__ == "__main__":
    sys.exit(main())
