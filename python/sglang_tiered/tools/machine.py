"""What a result was measured on, without anything that names the machine itself."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "date": datetime.date.today().isoformat(),
    }


def describe_versions() -> dict[str, str]:
    packages = ("sglang", "torch", "sglang-tiered")
    return {name: importlib.metadata.version(name) for name in packages}


def _cpu_model() -> str:
    """The processor's name where Linux tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
