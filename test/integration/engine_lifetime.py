"""A program with an engine that fails to start, one that runs, a second one beside it, and one
after it. Run as a script with the model and a tier directory; prints what came of each."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import psutil

import sglang_tiered
from sglang_tiered.errors import RequestError, TieredError
from sglang_tiered.storage.region.directory import DirectoryLock

PROMPT = list(range(65, 91)) * 20
LOCK_DEADLINE_S = (
    10.0  # children that are forked hold it too, until the kernel is through with them
)
SAMPLING = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def left() -> list[str]:
    """What an engine left behind: its processes that still run."""
    children = psutil.Process().children(recursive=True)
    running = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child.name() for child in running if "sglang" in child.name()]


def main() -> None:
    model, path = sys.argv[1:]
    settings = {
        "model_path": model,
        "dtype": "float32",
        "max_total_tokens": 4096,
        "tier_dir": path,
        "tier_nvme_bytes": "64MiB",
        "tier_host_bytes": "36MiB",
        "tier_load": "always",
    }
    try:  # what only a scheduler can know: pages that large do not fit
        sglang_tiered.Engine(**{**settings, "page_size": 2048, "tier_nvme_bytes": "8MiB"})
    except TieredError as error:
        with DirectoryLock(Path(path), timeout_s=LOCK_DEADLINE_S):
            print("refused", type(error).__name__, left())

    first = sglang_tiered.Engine(**settings)
    answer = first.generate(input_ids=PROMPT, sampling_params=SAMPLING)
    with contextlib.suppress(TieredError):
        sglang_tiered.Engine(**settings)
        print("second", "started")
    again = first.generate(input_ids=PROMPT, sampling_params=SAMPLING)
    print("first", again["output_ids"] == answer["output_ids"])
    print("durable", first.checkpoint(input_ids=PROMPT, tier="nvme", within_s=60).num_tokens)
    print("costs", len(first.costs().ranks), len(first.tenants()[0]))
    first.shutdown()
    first.shutdown()
    try:
        first.residency(input_ids=PROMPT)
    except RequestError as error:
        with DirectoryLock(Path(path), timeout_s=LOCK_DEADLINE_S):
            print("down", "shut down" in str(error), left())

    third = sglang_tiered.Engine(**settings)
    returned = third.generate(input_ids=PROMPT, sampling_params=SAMPLING)
    print("third", returned["output_ids"] == answer["output_ids"])
    print("loaded", returned["meta_info"]["cached_tokens_details"]["storage"])
    # The end of the process is the end of this one.


if __name__ == "__main__":
    main()
