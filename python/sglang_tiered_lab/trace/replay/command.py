"""``sglang-tiered trace replay``: the flags, and what they make happen."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import parse_bytes
from sglang_tiered_lab.trace.cluster import command as cluster
from sglang_tiered_lab.trace.inputs import Input, add_input_arguments
from sglang_tiered_lab.trace.replay import POLICIES, ROUTES
from sglang_tiered_lab.trace.replay.timing import PROFILES, Hardware

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered_lab.trace.replay.runner import Replay, Run
    from sglang_tiered_lab.trace.replay.sizes import TierSizes
    from sglang_tiered_lab.trace.replay.stream import TraceStream


# Flags that change one figure of the hardware: the field they set, and what it is.
_FIGURES = {
    "kv_bytes_per_token": "bytes of keys and values per token",
    "prefill_fixed_s": "prefill: seconds per request",
    "prefill_token_s": "prefill: seconds per new token",
    "prefill_pair_s": "prefill: seconds per pair of a new token and one it attends to",
    "host_bytes_per_s": "host to device",
    "nvme_read_bytes_per_s": "NVMe reads",
    "nvme_write_bytes_per_s": "NVMe writes",
    "nvme_fixed_s": "seconds per NVMe load",
}
_MAX_COUNT = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser, None)
    what = parser.add_argument_group("what to compare")
    what.add_argument(
        "--policy",
        metavar="NAME,...",
        help=f"of {', '.join(POLICIES)} (default: all); with --cluster of those below",
    )
    size = "bytes (64GiB), tokens (15Mtok), a share of the trace's unique tokens (30%%), or 0"
    what.add_argument("--device", metavar="SIZE", default="40GiB", help=f"{size}; per server")
    what.add_argument("--host", metavar="SIZE", default="64GiB")
    what.add_argument(
        "--nvme", metavar="SIZE,...", default="256GiB", help="several sizes are run one by one"
    )
    what.add_argument(
        "--writes-per-day", metavar="SIZE", help="NVMe write budget of each server, for tiered"
    )
    what.add_argument("--region-bytes", metavar="SIZE", help="(default: as the server chooses)")
    what.add_argument(
        "--page-tokens",
        metavar="N",
        type=_count,
        help="what tiers move at once; 64 is what a server does, the trace's own block size "
        "(default) is several times faster to simulate",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--servers", metavar="N", type=_count, default=1)
    load.add_argument(
        "--only-servers",
        metavar="A-B",
        type=_part,
        help="simulate a part of them, numbered from 0: they share nothing",
    )
    load.add_argument(
        "--route",
        choices=ROUTES,
        default="prefix",
        help="requests to servers: by a hash of their first 1,024 tokens, of their conversation, "
        "or in turn (default: %(default)s)",
    )
    load.add_argument(
        "--replicate", metavar="K", type=_count, default=1, help="independent copies of the trace"
    )
    load.add_argument(
        "--spread",
        metavar="SECONDS",
        type=_positive,
        default=60.0,
        help="within which the copies begin (default: %(default)s)",
    )
    load.add_argument(
        "--stretch",
        metavar="F",
        type=_positive,
        default=1.0,
        help="multiply all times between requests (default: %(default)s)",
    )
    machine = parser.add_argument_group("the modelled server")
    machine.add_argument(
        "--hardware", choices=list(PROFILES), default="8b-h100", help="(default: %(default)s)"
    )
    for name, text in _FIGURES.items():
        machine.add_argument(
            f"--{name.replace('_', '-')}", metavar="X", type=_figure, help=f"{text}"
        )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", type=Path, help="also write all figures there")
    output.add_argument("--plot", metavar="FILE", type=Path, help="PNG, PDF or SVG; needs [plot]")
    cluster.add_arguments(parser, _figure)
    output.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="(default: on a terminal)"
    )


def run(options: argparse.Namespace) -> int:
    """Replay and print. Returns the exit code; raises ``TieredError`` for what cannot be done."""
    if options.cluster:
        return cluster.run(options)
    from sglang_tiered_lab.trace.replay import plot, report
    from sglang_tiered_lab.trace.replay.runner import Replay, check_sizes
    from sglang_tiered_lab.trace.replay.stream import TraceStream

    policies = _policies(options.policy or ",".join(POLICIES))
    only = options.only_servers
    if only is not None and only.stop > options.servers:
        raise ConfigError(
            f"--only-servers {only.start}-{only.stop - 1} is not within the {options.servers} of "
            "--servers, which are numbered from 0; name some of those."
        )
    hardware = _hardware(options)
    _sizes(options, hardware, None)  # a bad size is refused before a long trace is read
    for path in (options.json, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: {path.absolute().parent} is no folder.")
    if options.plot is not None:
        plot.require(options.plot)
    stream = TraceStream(
        Input.of(options),
        page_tokens=options.page_tokens,
        stretch=options.stretch,
        replicate=options.replicate,
        spread_s=options.spread if options.replicate > 1 else 0.0,
        num_servers=options.servers,
        route=options.route,
    )
    sizes = _sizes(options, hardware, stream)
    for one in sizes:
        check_sizes(policies, one)
    plan = Replay(stream, hardware, policies, sizes, options.servers, only)
    start = time.perf_counter()
    runs = _with_progress(options, plan)
    wall_s = time.perf_counter() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.print_runs(plan, runs, wall_s=wall_s, peak_bytes=peak_bytes)
    if options.json is not None:
        settings = {key: _plain(value) for key, value in vars(options).items()}
        settings["trace"] = stream.name
        settings = {key: value for key, value in settings.items() if value is not None}
        report.write_json(
            options.json, plan, runs, settings=settings, wall_s=wall_s, peak_bytes=peak_bytes
        )
    if options.plot is not None:
        plot.draw(options.plot, plan, runs)
    return 0


def _plain(value: object) -> str | int | float | None:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, range):
        return f"{value.start}-{value.stop - 1}"
    # Results are published: a file's name, not where it lies.
    return value.name if isinstance(value, Path) else None


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy {name} is unknown; choose from {', '.join(POLICIES)}.")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--policy {text!r} must name each policy once.")
    return names


def _hardware(options: argparse.Namespace) -> Hardware:
    given = {name: getattr(options, name) for name in _FIGURES}
    changes = {name: value for name, value in given.items() if value is not None}
    for name, value in changes.items():
        if value == 0 and name.endswith(("_per_s", "_per_token")):
            raise ConfigError(f"--{name.replace('_', '-')} must be greater than zero.")
    if "kv_bytes_per_token" in changes:
        changes["kv_bytes_per_token"] = max(1, int(changes["kv_bytes_per_token"]))
    return dataclasses.replace(PROFILES[options.hardware], **changes)


def _sizes(
    options: argparse.Namespace, hardware: Hardware, stream: TraceStream | None
) -> list[TierSizes]:
    from sglang_tiered_lab.trace.replay.sizes import TierSizes, parse_size, region_bytes_for
    from sglang_tiered_lab.trace.replay.tiered import PAGE_TOKENS

    unique = None if stream is None else stream.survey.unique_tokens // options.servers
    unit_tokens = PAGE_TOKENS if stream is None else stream.survey.unit_tokens
    # Of a unit of several pages each is modelled as one page: a region holds as many of either.
    page_tokens, num_pages = min(PAGE_TOKENS, unit_tokens), max(1, unit_tokens // PAGE_TOKENS)
    per_token = hardware.kv_bytes_per_token

    def tokens(flag: str, text: str) -> int:
        return parse_size(flag, text, bytes_per_token=per_token, unique_tokens=unique)

    given = options.region_bytes
    region = None if given is None else parse_bytes("--region-bytes", given, otherwise="leave it")
    writes = options.writes_per_day
    budget = None
    if writes is not None:
        budget = parse_bytes("--writes-per-day", writes, otherwise="leave it out for no limit")
    device, host = tokens("--device", options.device), tokens("--host", options.host)
    sizes = []
    for text in options.nvme.split(","):
        nvme = tokens("--nvme", text)
        region_bytes = region_bytes_for(
            nvme * per_token // num_pages, hardware, page_tokens=page_tokens, given=region
        )
        sizes.append(
            TierSizes(
                device_tokens=device,
                host_tokens=host,
                nvme_tokens=nvme,
                nvme_bytes=nvme * per_token,
                region_bytes=region_bytes,
                writes_per_day=budget,
                label=text.strip(),
            )
        )
    if stream is not None and not any(one.nvme_tokens + host + device for one in sizes):
        raise ConfigError("--device, --host and --nvme are all 0; give one of them a size.")
    return sizes


def _with_progress(options: argparse.Namespace, plan: Replay) -> list[Run]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from sglang_tiered_lab.trace.replay.runner import num_steps, replay

    console = Console(stderr=True)
    shown = console.is_terminal if options.progress is None else options.progress
    if not shown:
        return replay(plan)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("replay", total=num_steps(plan))
        step: Callable[[int], None] = lambda count: progress.advance(task, count)  # noqa: E731
        return replay(plan, step)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= _MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MAX_COUNT:,}")
    return int(text)


def _part(text: str) -> range:
    match = re.fullmatch(r"([0-9]{1,7})-([0-9]{1,7})", text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part of the servers, such as 0-99")
    return range(int(match[1]), int(match[2]) + 1)


def _figure(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of zero or more")
    return value


def _positive(text: str) -> float:
    value = _figure(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be greater than zero")
    return value
