"""Pages that a codec makes shorter, for tiers that have one."""

from __future__ import annotations

import pytest

from kit.runs import MakeRun, make_run, make_soft_run


@pytest.fixture(name="make_run")
def make_run_fixture(request: pytest.FixtureRequest) -> MakeRun:
    """See ``kit.runs``."""
    return make_soft_run if "-zstd" in request.node.name else make_run
