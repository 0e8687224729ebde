"""What launches ask of Triton's compiler, on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import pytest


class NoDevice:
    """Stands in for Triton's driver: says what to compile for and runs nothing."""

    def get_current_device(self) -> str:
        return "no device"

    def get_current_stream(self, device: object) -> int:
        del device
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compiler_requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    from triton import knobs
    from triton.runtime.driver import driver

    collected: list[dict[str, Any]] = []

    def collect(**request: Any) -> bool:
        collected.append(request["compile"])
        return True

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", collect)
    monkeypatch.setattr(driver, "_active", NoDevice())
    return collected
