"""A program with one engine, the one of ``examples/engine.py``, and another after it that finds
what the first stored, with a third beside it. Run as a script with the model and a tier directory;
prints what came of each, and first what the example prints.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path

import psutil

import sglang_tiered
from sglang_tiered.errors import RequestError, TieredError
from sglang_tiered.storage.region.directory import DirectoryLock

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "engine.py"
LOCK_DEADLINE_S = 10.0  # forked children hold it too, until the kernel is through with them


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
        "tier_nvme_bytes": "1GiB",
        "tier_host_bytes": "36MiB",
        "tier_load": "always",
    }
    sys.argv[1:] = ["--model-path", model, "--tier-dir", path, "--dtype", "float32"]
    example = runpy.run_path(str(EXAMPLE))
    example["main"]()
    with DirectoryLock(Path(path), timeout_s=LOCK_DEADLINE_S):
        print("ended", left())

    engine = sglang_tiered.Engine(**settings)
    question = example["MANUAL"] + example["QUESTIONS"][0]
    returned = engine.generate(question, {"temperature": 0, "max_new_tokens": 16})
    print("returned", repr(returned["text"]))
    print("loaded", returned["meta_info"]["cached_tokens_details"]["storage"])
    print("durable", engine.checkpoint(text=question, tier="nvme", within_s=60).num_tokens)
    print("costs", len(engine.costs().ranks), len(engine.tenants()[0]))
    with contextlib.suppress(TieredError):
        sglang_tiered.Engine(**settings)
        print("second", "started")
    engine.shutdown()
    engine.shutdown()
    try:
        engine.residency(input_ids=[1])
    except RequestError as error:
        with DirectoryLock(Path(path), timeout_s=LOCK_DEADLINE_S):
            print("down", "shut down" in str(error), left())


if __name__ == "__main__":
    main()
