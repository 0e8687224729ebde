"""(f) Every shipped tile, serial and fused, beside the others, on three mixes."""

from __future__ import annotations

from gpu_report.figures import Part, SkippedError, run_part
from gpu_report.pod import measure


def run(part: Part) -> None:
    if part.rehearse:
        raise SkippedError("the interpreter has nothing to measure; pod compares its results")
    measure(part, "pod_swept", "--quick", "--sweep")


if __name__ == "__main__":
    run_part("sweep", run)
