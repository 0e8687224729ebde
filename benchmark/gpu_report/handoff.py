"""(d) A prompt's KV from a prefill rank's pool to a decode process: out of a device over TCP, and
out of host memory over TCP and on one host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from gpu_report.figures import Part, run_part
from sglang_tiered.integration.disaggregation.device_memory import DeviceMemory
from sglang_tiered.transfer.memory import Buffer
from transfer_bench import goodput
from transfer_bench.pools import Shape

if TYPE_CHECKING:
    from transfer_bench.pools import Pool


def run(part: Part) -> None:
    if part.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    shape = Shape(part.size(8, 8, 1), part.size(256, 128, 4))
    rounds = part.size(9, 5, 1)
    kept: list[torch.Tensor] = []

    def on_device(pool: Pool) -> DeviceMemory:
        device = torch.from_numpy(pool.array).to(part.device)
        kept.append(device)
        return DeviceMemory(
            [Buffer(one.data_ptr(), one.nbytes, shape.page_bytes) for one in device], part.device
        )

    for source, ways, make in (
        ("device", ["tcp", "tcp, 2 connections"], on_device),
        ("host", ["tcp", "same host"], None),
    ):
        samples = goodput.measure(shape, rounds, ways, source=make)
        for way, found in samples.items():
            rates = [shape.prompt_bytes / seconds / 1e9 for seconds in found.seconds]
            name = way.replace(",", "").replace(" ", "_")
            part.save_samples(f"handoff_{source}_{name}", rates, "GB/s")


if __name__ == "__main__":
    run_part("handoff", run)
