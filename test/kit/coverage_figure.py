"""One line at the end of a run that measures coverage (``scripts/test --all --coverage``).

Measured are the tests of a few rooms, in pytest's own processes: tracing every line of a server
would cost the gate minutes, and change when its threads meet. What servers, children and other
rooms run is not in the figure.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__all__ = ["MEASURED_ROOMS", "pytest_collection_modifyitems", "pytest_terminal_summary"]

MEASURED_ROOMS = ("unit", "contract", "property")
TESTS = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _measuring(config) is None:
        return
    for item in items:
        if item.path.relative_to(TESTS).parts[0] not in MEASURED_ROOMS:
            item.add_marker("no_cover")  # pytest-cov stops for the call of such a test


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    plugin = _measuring(config)
    if plugin is not None and plugin.cov_controller is not None:
        from coverage.exceptions import NoDataError

        percent = 0.0
        with contextlib.suppress(NoDataError):
            percent = plugin.cov_controller.cov.report(file=io.StringIO())
        rooms = ", ".join(MEASURED_ROOMS)
        terminalreporter.write_line(
            f"coverage: {percent:.0f} % of the package's lines, by the tests of {rooms} alone and "
            "in their own processes (no servers, no child processes, no other tests)"
        )


def _measuring(config: pytest.Config) -> Any:
    """pytest-cov's plugin, where it was asked for."""
    asked = getattr(config.option, "cov_source", None)
    return config.pluginmanager.getplugin("_cov") if asked else None
