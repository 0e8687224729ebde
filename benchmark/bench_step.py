"""What the cache costs the scheduler thread per step, with many requests that wait for loads.

The real cache, store and threads without a model; a disk that holds every read back while steps are
timed. All prompts are in the store, every request asks for its own, as many loads begin as host
memory has room for, and the others wait for their turn. A step is what SGLang's scheduler asks of
the cache when it goes through the whole queue: its events, loads that are due to be asked for
again, and of each request whether its load has ended; and the record that ``GET /tier/costs``
answers, which a server writes every 50 ms only. The policy is the default, taught that a token
takes a second to compute, so that every load pays and is waited for. SGLang's own part of these
calls is in the figure. Times are processor time of the thread: what other threads and processes
take is not in it.

    python benchmark/bench_step.py [--quick] [--waiting 1000] [--loads 400] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sglang_tiered.tools.machine import describe_machine, describe_versions
from step_bench.world import PAGE, PAGES_EACH, Waiting, make_world
from storage_bench.figures import summarize

WANTED_MS = {"p50": 1.0, "p99": 3.0}
WANTED_GROWTH = 2.2
WARM_STEPS = 5


def measure(directory: Path, num_waiting: int, num_loads: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds of each step, and how many loads were under way meanwhile."""
    requests = [Waiting(number) for number in range(num_waiting)]
    with make_world(directory, num_loads) as world:
        world.store(requests)
        world.shut_disk()
        world.arrive(requests)
        for _ in range(WARM_STEPS):
            world.step(requests)
        found = world.num_loads
        gc.collect()
        gc.disable()
        steps = [1e3 * world.step(requests) for _ in range(num_steps)]
        gc.enable()
        return {
            "waiting": num_waiting,
            "loads": found,
            "loads_at_the_end": world.num_loads,
            "step_ms": steps,
            "step_ms_p50": float(np.percentile(steps, 50)),
            "step_ms_p99": float(np.percentile(steps, 99)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--waiting", type=int, default=1000, help="requests in the queue")
    parser.add_argument("--loads", type=int, default=400, help="loads that memory has room for")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    num_steps = 100 if arguments.quick else 500
    raw: dict[str, dict[str, Any]] = {}
    table = Table("waiting", "loads", "step p50", "step p99", "wanted")
    for times in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(
                Path(folder), times * arguments.waiting, times * arguments.loads, num_steps
            )
        raw[f"times {times}"] = found
        wanted = " and ".join(f"{ms:g} ms" for ms in WANTED_MS.values()) if times == 1 else ""
        figures = (f"{found[key]:.2f} ms" for key in ("step_ms_p50", "step_ms_p99"))
        table.add_row(f"{found['waiting']:,}", f"{found['loads']:,}", *figures, wanted)
    growth = raw["times 2"]["step_ms_p50"] / raw["times 1"]["step_ms_p50"]
    console = Console()
    console.print(table)
    console.print(
        f"step_ms_p50 at twice the counts over once: {growth:.2f}, wanted at most {WANTED_GROWTH}."
    )
    if arguments.json is not None:
        result = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {
                "steps": num_steps,
                "page_size": PAGE,
                "pages_of_a_prompt": PAGES_EACH,
            },
            "ratios": {
                "step_ms_p50": summarize([raw["times 1"]["step_ms_p50"]]),
                "step_ms_p99": summarize([raw["times 1"]["step_ms_p99"]]),
                "step_at_twice_over_once": summarize([growth]),
            },
            "raw": raw,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
