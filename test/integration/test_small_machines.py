"""`scripts/serve` on machines of other sizes: a control group's limit counts as the machine's."""

from __future__ import annotations

import contextlib
import re
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typed_command import Desk, interrupt

from server_process import START_DEADLINE_S, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

GiB = 1 << 30


@dataclass(frozen=True)
class Group:
    """A memory control group, of version 1 or 2."""

    path: Path
    limit_bytes: int

    @classmethod
    def make(cls, limit_bytes: int) -> Group:
        is_v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        root = Path("/sys/fs/cgroup") if is_v2 else Path("/sys/fs/cgroup/memory")
        group = cls(root / f"sglang-tiered-test-{uuid.uuid4().hex[:8]}", limit_bytes)
        try:
            group.path.mkdir()
            limit = group.path / ("memory.max" if is_v2 else "memory.limit_in_bytes")
            limit.write_text(str(limit_bytes))
        except OSError as error:
            with contextlib.suppress(OSError):
                group.path.rmdir()
            pytest.skip(f"this user may not make a memory control group ({error})")
        return group

    def around(self, line: str) -> str:
        """The command line, started within the group."""
        return f"echo $$ > {self.path}/cgroup.procs && exec {line}"

    def peak_bytes(self) -> int:
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            if (self.path / name).exists():
                return int((self.path / name).read_text())
        raise AssertionError("the group does not say what it took")

    def remove(self) -> None:
        self.path.rmdir()


@pytest.fixture
def desk(model: Path, tmp_path: Path) -> Desk:
    return Desk.lay_out(tmp_path, model)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Group]:
    group = Group.make(request.param * GiB)
    yield group
    group.remove()


def count(text: str, row: str) -> int:
    """Tokens that a row of the banner names."""
    found = re.search(rf"^  {row} +([\d,]+) tokens", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("machine", [6], indirect=True, ids="{}GiB".format)
def test_demo_without_flags_serves_in_limited_memory(
    machine: Group, desk: Desk, tmp_path: Path
) -> None:
    port = free_port()
    line = machine.around(f"scripts/serve --port {port}")
    server = desk.start(line, port, tmp_path / "log")
    try:
        desk.try_what_is_printed(server)
        assert count(server.log, "device") == 8192
        assert count(server.log, "host") >= 2 * 8192
        prompts = [[65 + number] * 2000 for number in range(10)]
        first = [server.generate(prompt) for prompt in prompts]
        again = server.generate(prompts[0])
        assert again.output_ids == first[0].output_ids
        # Ten prompts have pushed the first one out of device and host memory.
        assert again.cached["storage"] > 0
        interrupt(server)
        assert GiB < machine.peak_bytes() < machine.limit_bytes
    finally:
        server.kill()


@pytest.mark.parametrize("machine", [16], indirect=True, ids="{}GiB".format)
def test_default_pools_fit_the_memory_limit(machine: Group, desk: Desk, tmp_path: Path) -> None:
    """By the command that the pages name in a sentence, with a model and no other flag."""
    port = free_port()
    line = machine.around(f"sglang-tiered serve --model-path M --port {port}")
    server = desk.start(line, port, tmp_path / "log")
    try:
        desk.try_what_is_printed(server)
        device, host = count(server.log, "device"), count(server.log, "host")
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
def test_too_little_memory_is_refused_before_loading(machine: Group, desk: Desk) -> None:
    done = subprocess.run(
        ["bash", "-c", machine.around(f"scripts/serve --port {free_port()}")],
        cwd=desk.folder,
        env=desk.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_DEADLINE_S,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("sglang-tiered:")]
    assert "needs at least 2." in sentence and "--model-path" in sentence
    assert "Traceback" not in done.stderr and "Load weight" not in done.stderr
