"""Servers on machines of other sizes: a control group's limit counts as the machine's. The demo's
is in ``test_typed_commands``."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest
from memory_group import GiB, Group, limited
from typed_command import Desk, interrupt, num_tokens

from conftest import ROOT
from server_process import START_DEADLINE_S, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zygote import Zygotes

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Group]:
    with limited(request.param * GiB) as group:
        if group is None:
            pytest.skip("this user may not make a memory control group")
        yield group


@pytest.mark.parametrize("machine", [8], indirect=True, ids="{}GiB".format)
def test_default_pools_fit_the_memory_limit(machine: Group, model: Path, tmp_path: Path) -> None:
    """By the command that the pages name in a sentence, with a model and no other flag."""
    port, desk = free_port(), Desk.lay_out(tmp_path, model)
    line = machine.around(f"sglang-tiered serve --model-path M --port {port}")
    server = desk.start(line, port, tmp_path / "log")
    try:
        desk.try_what_is_printed(server)
        device, host = num_tokens(server.log, "device"), num_tokens(server.log, "host")
        assert host >= 1.25 * device
        found = re.search(r"KV Cache is allocated\. dtype: torch\.(\w+)", server.log)
        assert found is not None  # which one follows the processor
        token_bytes = 3072 if found[1] == "float32" else 1536
        assert (device + host) * token_bytes < 0.75 * machine.limit_bytes
        assert GiB < machine.peak_bytes() < machine.limit_bytes
        interrupt(server)
    finally:
        server.kill()


@pytest.mark.parametrize("machine", [2], indirect=True, ids="{}GiB".format)
def test_too_little_memory_is_refused_before_loading(
    machine: Group, model: Path, zygotes: Zygotes, tmp_path: Path
) -> None:
    program = str(ROOT / "test" / "integration" / "limited_server.py")
    command = [program, str(machine.processes), "--model-path", str(model), "--dtype", "float32"]
    command += ["--port", str(free_port()), "--tier-dir", str(tmp_path / "kv")]
    process = zygotes.fork(command, dict(os.environ), tmp_path / "log")
    try:
        code = process.wait(START_DEADLINE_S)
    finally:
        process.kill()
    log = (tmp_path / "log").read_text(errors="replace")
    assert code == 2, log[-2000:]
    (sentence,) = [line for line in log.splitlines() if line.startswith("sglang-tiered:")]
    assert "needs at least 2." in sentence and "--model-path" in sentence
    assert "Traceback" not in log and "Load weight" not in log
