"""Two processes, as two ranks of one server, collected together as SGLang's ``/metrics`` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from kit.promtool import check_metrics
from kit.scrapes import by_rank

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(120)

TIMEOUT_S = 60.0
RANK = """
import sys
from kit.process_stats import FULL, STATS, with_engine
from sglang_tiered.integration.observe.exporter import MetricsExporter
from sglang_tiered.storage.base import Health, JobKind, Reason

rank, now, current = sys.argv[1], [0.0], [with_engine(reasons={})]
labels = {"model_name": "m", "engine_type": "unified", "tp_rank": rank, "pp_rank": "0"}
exporter = MetricsExporter(lambda: current[0], lambda: now[0], labels=labels)
for line in sys.stdin:
    if line == "sick\\n":
        failed = {(JobKind.LOAD, Reason.IO_ERROR): 3}
        current[0] = with_engine(health=Health.MISS_ONLY, num_pages_stored=9, reasons=failed)
    elif line == "full\\n":
        current[0] = FULL
    exporter.export()
    now[0] += 1.0
    print("exported", flush=True)
"""

Ranks = list[subprocess.Popen[str]]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Processes that export once per line: as told before, or as the line says."""
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)


def tell(rank: subprocess.Popen[str], line: str) -> None:
    assert rank.stdin is not None and rank.stdout is not None
    rank.stdin.write(f"{line}\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "exported\n"


def scrape(directory: Path) -> str:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(directory))  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()


def test_sick_rank_is_seen_beside_a_healthy_one(ranks: Ranks, tmp_path: Path) -> None:
    for rank in ranks:
        tell(rank, "as it was")
    failures = {"tier": "nvme", "operation": "load", "reason": "io_error"}
    before = scrape(tmp_path)
    assert by_rank(before, "tier_healthy", tier="nvme") == {"0": 1.0, "1": 1.0}
    assert by_rank(before, "page_outcomes_total", **failures) == {"0": 0.0, "1": 0.0}
    tell(ranks[0], "as it was")
    tell(ranks[1], "sick")
    after = scrape(tmp_path)
    assert by_rank(after, "tier_healthy", tier="nvme") == {"0": 1.0, "1": 0.0}
    assert by_rank(after, "page_outcomes_total", **failures) == {"0": 0.0, "1": 3.0}
    assert by_rank(after, "stored_pages_total", tier="nvme") == {"0": 5.0, "1": 9.0}
    assert by_rank(after, "prefill_tokens_per_second") == {}, "nothing was computed"
    assert by_rank(after, "store_duration_seconds_count", tier="nvme") == {"0": 1.0, "1": 1.0}


def test_promtool_finds_no_fault_with_any_metric(ranks: Ranks, tmp_path: Path) -> None:
    tell(ranks[0], "full")
    check_metrics(scrape(tmp_path))
