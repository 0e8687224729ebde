"""(0) What the machine has: packages, memory, disk, registered host memory, a product."""

from __future__ import annotations

import importlib
import shutil
import time
from pathlib import Path

import torch

from gpu_report.disk import takes_direct
from gpu_report.figures import Part, run_part

# What a server and the parts import.
WANTED = (
    *("numpy", "triton", "transformers", "tokenizers", "safetensors", "sglang", "msgspec", "zmq"),
    *("fastapi", "uvicorn", "uvloop", "orjson", "openai", "aiohttp", "httpx", "xxhash", "psutil"),
    *("prometheus_client", "rich", "compressed_tensors", "gguf", "xgrammar", "zstandard"),
    *("pytest", "pytest_timeout", "hypothesis", "sglang.srt.server_args", "sglang_tiered.config"),
    *("sglang_tiered_kernels.page_copy", "sglang_tiered_kernels.pod_attention"),
)


def run(part: Part) -> None:
    lacking = []
    begin = time.perf_counter()
    for name in WANTED:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a package may raise anything
            lacking.append(f"{name}: {type(error).__name__}: {str(error)[:120]}")
    spent = time.perf_counter() - begin
    part.save("packages_lacking", len(lacking), "packages", names=lacking, seconds=spent)
    memory = dict(
        line.split(":") for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    for name, key in (("memory_total", "MemTotal"), ("memory_available", "MemAvailable")):
        part.save(name, int(memory[key].split()[0]) / 2**20, "GiB")
    part.save("disk_free", shutil.disk_usage(part.folder).free / 1e9, "GB")
    part.save("disk_takes_o_direct", int(takes_direct(part.folder)), "yes")
    if part.rehearse:
        return
    device = torch.device(part.device)
    left = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize(device)
    part.save("product_norm", float((left @ left).float().norm()), "1")
    free, total = torch.cuda.mem_get_info(device)
    part.save("device_memory", total / 2**30, "GiB", free=free / 2**30)
    host = torch.empty(1 << 28, dtype=torch.uint8)
    code = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0)
    registered = int(code) == 0 and host.is_pinned()
    part.save("host_memory_registered", int(registered), "yes", code=int(code))


if __name__ == "__main__":
    run_part("machine", run)
