"""A real Prometheus of one's own that scrapes one server, and what it answers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_process import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator


SCRIPT = Path(__file__).parents[2] / "scripts" / "prometheus"
START_DEADLINE_S = 30.0
ANSWER_DEADLINE_S = 30.0


class NoPrometheusError(Exception):
    """There is none to be had, or it does not answer. One sentence."""


@dataclass(frozen=True)
class Prometheus:
    url: str
    version: str

    def ask(self, path: str, **parameters: str | float) -> Any:
        """``data`` of an answer. Raises ``NoPrometheusError`` with Prometheus' own words."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(
                f"{self.url}{path}?{query}", timeout=ANSWER_DEADLINE_S
            ) as r:
                return json.load(r)["data"]
        except urllib.error.HTTPError as error:
            raise NoPrometheusError(f"Prometheus refused {query}: {error.read()!r}") from error
        except OSError as error:
            raise NoPrometheusError(f"Prometheus does not answer: {error}") from error

    def over_time(
        self, expression: str, begun: float, ended: float, step_s: float
    ) -> list[dict[str, Any]]:
        """Every series of an expression, as Grafana's graphs ask for them."""
        answer = self.ask(
            "/api/v1/query_range", query=expression, start=begun, end=ended, step=step_s
        )
        return list(answer["result"])


@contextlib.contextmanager
def run_prometheus(target: str, instance: str, scrape_s: int, folder: Path) -> Iterator[Prometheus]:
    """Scrapes ``target`` (host and port), which its series name ``instance``."""
    found = subprocess.run([SCRIPT], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise NoPrometheusError(found.stderr.strip())
    program = found.stdout.strip()
    job = {
        "job_name": "sglang-tiered",
        "static_configs": [{"targets": [target], "labels": {"instance": instance}}],
    }
    config = {"global": {"scrape_interval": f"{scrape_s}s"}, "scrape_configs": [job]}
    (folder / "prometheus.yaml").write_text(json.dumps(config), encoding="utf-8")
    url = f"127.0.0.1:{free_port()}"
    command = [
        program,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'series'}",
        f"--web.listen-address={url}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            with contextlib.suppress(NoPrometheusError):
                version = Prometheus(f"http://{url}", "").ask("/api/v1/status/buildinfo")["version"]
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise NoPrometheusError("Prometheus did not start: " + last_line(folder))
            time.sleep(0.1)
        yield Prometheus(f"http://{url}", str(version))
    finally:
        process.terminate()
        try:
            process.wait(START_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_line(folder: Path) -> str:
    said = (folder / "prometheus.log").read_text(errors="replace").strip().splitlines()
    return said[-1] if said else "nothing in its log"
