"""Record what every panel of the dashboard shows of a real server, as a real Prometheus answers.

    python benchmark/record_dashboard.py --json FILE [--seconds 240]

A server of ``scripts/serve`` with little memory and an NVMe tier answers users whose conversations
return; for a while in the middle its disk is slow (``slow_disk``). Prometheus scrapes it as it
would any other. Each panel's own expressions are then asked over the whole time, with the interval
of rates that Grafana would take. ``draw_results.py`` draws the picture of the documents from FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dashboard_run.prometheus_process import NoPrometheusError, Prometheus, run_prometheus
from dashboard_run.traffic import Traffic, converse
from server_process import Server, free_port
from serving_bench.client import RequestFailedError
from sglang_tiered.tools.machine import describe_machine, describe_versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "scripts" / "grafana" / "sglang-tiered.json"
SCRAPE_S = STEP_S = 5
RATE_S = max(4 * SCRAPE_S, STEP_S + SCRAPE_S)  # Grafana's $__rate_interval
SLOW_FROM, SLOW_TO = 0.4, 0.6  # shares of the time
SLOW_BYTES_PER_S = 1_500_000
START_DEADLINE_S = 900.0  # on two cores that are idle it takes 20 s
DEVICE_TOKENS = 5120
WARM_UP_S = 5.0  # the first request of a server's life, and the client's imports, take seconds
NVME_BYTES = "96MiB"
HOOK = Path(__file__).parent / "slow_disk"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=240.0, help="default: %(default)s")
    options = parser.parse_args()
    try:
        document = record(options.seconds)
    except (NoPrometheusError, RequestFailedError) as error:
        print(f"record_dashboard: {error}", file=sys.stderr)
        return 1
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def record(seconds: float) -> dict[str, Any]:
    traffic = Traffic()
    with tempfile.TemporaryDirectory(prefix="dashboard-") as name:
        folder = Path(name)
        disk = {"SLOW_DISK_FILE": folder / "writes", "SLOW_DISK_READ_FILE": folder / "reads"}
        set_speed(disk, 0)
        with (
            serving(folder, disk) as server,
            run_prometheus(f"127.0.0.1:{server.port}", "server", SCRAPE_S, folder) as prometheus,
        ):
            wait_for_scrape(prometheus)
            converse(Traffic(num_conversations=4, seed=0), server.url, WARM_UP_S)
            timers = [
                threading.Timer(seconds * share, set_speed, (disk, speed))
                for share, speed in ((SLOW_FROM, SLOW_BYTES_PER_S), (SLOW_TO, 0))
            ]
            begun = time.time()
            for timer in timers:
                timer.start()
            try:
                answered = converse(traffic, server.url, seconds)
            finally:
                for timer in timers:
                    timer.cancel()
            ended = time.time()
            panels = recorded(prometheus, begun, ended)
            versions = {**describe_versions(), "prometheus": prometheus.version}
    return {
        "machine": describe_machine(),
        "versions": versions,
        "settings": {
            "server": f"scripts/serve --max-total-tokens {DEVICE_TOKENS} "
            f"--tier-nvme-bytes {NVME_BYTES} --enable-metrics",
            "traffic": asdict(traffic),
            "seconds": seconds,
            "scrape_s": SCRAPE_S,
            "step_s": STEP_S,
            "rate_s": RATE_S,
            "slow_disk": {
                "bytes_per_s": SLOW_BYTES_PER_S,
                "from_s": seconds * SLOW_FROM,
                "to_s": seconds * SLOW_TO,
            },
        },
        "ratios": {},
        "raw": {"answered": answered, "panels": panels},
    }


@contextlib.contextmanager
def serving(folder: Path, disk: Mapping[str, Path]) -> Iterator[Server]:
    """The demo server as users start it, in a place of its own."""
    port = free_port()
    command = [
        str(ROOT / "scripts" / "serve"),
        *("--max-total-tokens", str(DEVICE_TOKENS), "--tier-nvme-bytes", NVME_BYTES),
        *("--tier-dir", str(folder / "kv"), "--host", "127.0.0.1", "--port", str(port)),
        "--enable-metrics",
    ]
    paths = [str(HOOK), *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {variable: str(path) for variable, path in disk.items()}
    log_path = folder / "server.log"
    server = Server(port, Server.open_process(command, environment, log_path), log_path)
    try:
        server.wait_until_it_generates(START_DEADLINE_S)
        yield server
    except RequestFailedError as error:
        raise RequestFailedError(f"{error}; the server's log ends: {server.log[-2000:]}") from error
    finally:
        server.stop()


def set_speed(disk: Mapping[str, Path], bytes_per_s: float) -> None:
    """From the next read and write on; 0 is no limit."""
    for path in disk.values():
        new = path.with_suffix(".new")
        new.write_text(str(bytes_per_s), encoding="utf-8")
        new.replace(path)


def wait_for_scrape(prometheus: Prometheus) -> None:
    deadline = time.monotonic() + 60
    while not prometheus.ask("/api/v1/query", query="sglang_tiered_build_info")["result"]:
        if time.monotonic() > deadline:
            raise NoPrometheusError("Prometheus sees no metric of this package.")
        time.sleep(0.5)


def recorded(prometheus: Prometheus, begun: float, ended: float) -> list[dict[str, Any]]:
    """What each panel shows: its lines, with a value for every step, or null."""
    panels: list[dict[str, Any]] = []
    row = ""
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        defaults, own = panel["fieldConfig"]["defaults"], panel["fieldConfig"]["overrides"]
        units = {one["matcher"]["options"]: one["properties"][0]["value"] for one in own}
        lines = []
        for target in panel["targets"]:
            for series in prometheus.over_time(filled(target["expr"]), begun, ended, STEP_S):
                line = {
                    "legend": legend(target["legendFormat"], series["metric"]),
                    "values": values(series["values"], begun, ended),
                }
                if target["refId"] in units:
                    line["unit"] = units[target["refId"]]
                lines.append(line)
        panels.append(
            {
                "row": row,
                "title": panel["title"],
                "unit": defaults["unit"],
                "is_stacked": "stacking" in defaults["custom"],
                "lines": lines,
            }
        )
    return panels


def filled(expression: str) -> str:
    """As Grafana sends it with every variable at All."""
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", f"{RATE_S}s"))


def legend(pattern: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern)


def values(samples: list[tuple[float, str]], begun: float, ended: float) -> list[float | None]:
    """One for each step, with four digits; null where the series has none, or no number."""
    by_step = {round((at - begun) / STEP_S): float(text) for at, text in samples}
    steps = range(int((ended - begun) / STEP_S) + 1)
    found = [by_step.get(step, math.nan) for step in steps]
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in found]


if __name__ == "__main__":
    sys.exit(main())
