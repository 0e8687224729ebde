"""One line at the end of a run that measures coverage (``scripts/test --all --coverage``).

Measured are the tests of ``contract`` and ``unit`` that start neither SGLang nor an interpreter of
kernels, in pytest's own processes. Tracing doubles the time of what it measures.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
MEASURED = (TESTS / "contract", TESTS / "unit")
LEFT_OUT = tuple(TESTS / "unit" / name for name in ("benchmark", "integration", "kernels"))
OMITTED = ("*/sglang_tiered/integration/*", "*/sglang_tiered/launch_server.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _measuring(config) is None:
        return
    for item in items:
        above = item.path.parents
        if not any(room in above for room in MEASURED) or any(room in above for room in LEFT_OUT):
            item.add_marker("no_cover")  # pytest-cov stops for the call of such a test


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    plugin = _measuring(config)
    if plugin is not None and plugin.cov_controller is not None:
        from coverage.exceptions import NoDataError

        percent = 0.0
        with contextlib.suppress(NoDataError):
            percent = plugin.cov_controller.cov.report(file=io.StringIO(), omit=OMITTED)
        terminalreporter.write_line(
            f"coverage: {percent:.0f} % of the package's lines but those of integration, by the "
            "tests of unit and contract alone, in their own processes: no servers, no children"
        )


def _measuring(config: pytest.Config) -> Any:
    asked = getattr(config.option, "cov_source", None)
    return config.pluginmanager.getplugin("_cov") if asked else None
