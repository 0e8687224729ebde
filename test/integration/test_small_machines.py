"""Servers on machines of other sizes: a control group's limit counts as the machine's. The demo's
is in ``test_typed_commands``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_group import GiB, Group, limited
from typed_command import Desk, interrupt, num_tokens

from server_process import free_port

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def machine() -> Iterator[Group]:
    with limited(8 * GiB) as group:
        if group is None:
            pytest.skip("this user may not make a memory control group")
        yield group


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
