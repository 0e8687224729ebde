"""What ``--tier-log-requests`` costs the scheduler: the processor time of its thread, per request.

Each request is told to the real notes as a server tells it: it arrives, is looked up and planned,
waits for its load over a few steps, is admitted, copied, computed in a batch, and ends; its line is
written to a real file by the writer's thread, whose time is not the scheduler's. The same calls are
made without the flag. Reads are noted by other threads in a server, and are not counted.

    python benchmark/measure_request_log.py [--quick] [--directory DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from sglang_tiered.integration.cache.load_planner import LoadPlanner  # noqa: E402
from sglang_tiered.integration.identity.tenants import HiddenTenants  # noqa: E402
from sglang_tiered.integration.observe.stories import Stories  # noqa: E402
from sglang_tiered.integration.observe.story import LineWriter  # noqa: E402
from sglang_tiered.policy.cost_model import CostModel  # noqa: E402
from sglang_tiered.storage.base import Span, Tier  # noqa: E402
from sglang_tiered.tools.machine import describe_machine, describe_versions  # noqa: E402

NUM_RUNS, NUM_STEPS = 7, 10
PROMPT = list(range(4096))
SCHEDULER: Any = SimpleNamespace(waiting_queue=[], running_batch=SimpleNamespace(reqs=[]))


def make_requests(number: int) -> list[Any]:
    sampling = SamplingParams(max_new_tokens=1)
    return [Req(f"r{each:032}", "", PROMPT, sampling) for each in range(number)]


def tell(notes: Stories, reqs: list[Any]) -> float:
    """Return the processor seconds of this thread for telling of all these requests."""
    spans = [Span(Tier.NVME, 60)]
    for req in reqs:
        req.finished_reason = FINISH_LENGTH(1)
    begun = time.thread_time()
    for req in reqs:
        request = req.cache_request_handle
        notes.arrives(SCHEDULER, req)
        notes.looked_up(request, notes.clock(), num_before=0, num_new=4096, spans=spans)
        notes.planned(
            request,
            num_held=3840,
            num_loaded=3840,
            num_ahead=0,
            is_declined=False,
            is_back=False,
        )
        notes.begun(request)
        for _ in range(NUM_STEPS):
            notes.may_start(request, is_ready=False)
        notes.load_ended(request, 3840)
        notes.may_start(request, is_ready=True)
        notes.admitted(request)
        notes.copied(req, 3840)
        notes.batch_ran([req], [(256, 3840)], 0.01, copies_beside=True)
        notes.released(req)
        notes.step()
    return time.thread_time() - begun


def stories(writer: LineWriter | None) -> Stories:
    planner: LoadPlanner[Any] = LoadPlanner(CostModel(page_tokens=64, bytes_per_token=1 << 17))
    return Stories(planner, writer, tenant_of=HiddenTenants().tenant_of)


def written(path: Path, number: int) -> float:
    """Return the seconds for requests whose lines are written to a file."""
    writer = LineWriter(path, max_bytes=1 << 30, max_queued=number + 1)
    notes = stories(writer)
    took_s = tell(notes, make_requests(number))
    notes.close()
    assert writer.num_dropped == 0
    assert sum(1 for _ in path.open("rb")) == number
    return took_s


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--directory", type=Path, help="where the lines are written")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    number = 500 if arguments.quick else 5000
    raw: dict[str, list[float]] = {"on_us": [], "off_us": []}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        written(Path(name, "warm-up"), 100)
        for run in range(NUM_RUNS):
            path = Path(name, f"run-{run}")
            raw["on_us"].append(written(path, number) / number * 1e6)
            raw["off_us"].append(tell(stories(None), make_requests(number)) / number * 1e6)
            line_bytes = path.stat().st_size / number
    medians = {key: statistics.median(values) for key, values in raw.items()}
    report = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {"num_requests": number, "num_steps": NUM_STEPS},
        "ratios": {},
        "raw": {**raw, **{f"median_{key}": value for key, value in medians.items()}},
        "line_bytes": round(line_bytes),
    }
    print(
        f"{medians['on_us']:.0f} us of the scheduler's thread per request with the flag, "
        f"{medians['off_us']:.1f} us without; a line has {line_bytes:,.0f} bytes"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
