"""``scripts/demo`` as it stands: every tier is reached, and nothing is left however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conftest import ALWAYS, Launch

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo"
ENDS_WITHIN_S = 60.0
EXPECTED = {
    "first time": "computed",
    "device": "device",
    "host": "host",
    "NVMe": "nvme",
    "NVMe after kill -9": "nvme",
}


def start(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    """In a process group of its own, as a shell starts what runs in a terminal's foreground."""
    return subprocess.Popen(
        [SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "TMPDIR": str(temporary),
            "SGLANG_TIERED_DEMO_MODEL": "random",  # the trained one has a module of its own
            # Threads that wait by spinning take the cores of whatever else a test machine does.
            "OMP_WAIT_POLICY": "passive",
            # Otherwise SGLang's processes overwrite what ``left_behind`` knows them by.
            "SPT_NOENV": "1",
        },
    )


def left_behind(temporary: Path) -> list[str]:
    """Processes that inherited our TMPDIR, or a folder in it as theirs, and the folders."""
    found = [str(path) for path in temporary.iterdir()]
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR", "").startswith(str(temporary)):
                found.append(f"{process.pid} {process.name()}")
        except psutil.Error:  # ended meanwhile, or somebody else's
            continue
    return found


def expect_nothing_left(temporary: Path) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while left := left_behind(temporary):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The TMPDIR of a demo, where SGLang's sockets lie: the path of a socket has 107 bytes at most.
    What a failed test left in it is killed."""
    with tempfile.TemporaryDirectory(prefix="demo-test-", dir="/tmp") as name:
        place = Path(name)
        yield place
        for line in left_behind(place):
            pid = line.partition(" ")[0]
            if pid.isdigit():
                os.kill(int(pid), signal.SIGKILL)


def rows_of(path: Path) -> dict[str, dict[str, float]]:
    """The share of the tokens that each row has from each tier."""
    report = json.loads(path.read_text())
    assert report["answers_equal"] is True
    rows = {row["from"]: row["tokens"] for row in report["rows"]}
    return {
        name: {tier: number / sum(row.values()) for tier, number in row.items()}
        for name, row in rows.items()
    }


def test_every_tier_is_reached_and_survives_kill(temporary: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    demo = start(temporary, "--json", str(path))
    out, err = demo.communicate(timeout=800)
    assert demo.returncode == 0, err
    assert not err
    rows = rows_of(path)
    assert rows.keys() == EXPECTED.keys()
    for source, tier in EXPECTED.items():
        assert f"\n{source} " in out
        assert rows[source][tier] > 0.9, rows[source]
    expect_nothing_left(temporary)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_demo_leaves_no_process_and_no_folder(
    temporary: Path, number: signal.Signals
) -> None:
    demo = start(temporary)
    assert demo.stdout is not None
    assert any(line.startswith("Starting") for line in demo.stdout), demo.communicate()
    os.killpg(demo.pid, number)
    out, err = demo.communicate(timeout=ENDS_WITHIN_S)
    assert demo.returncode == 128 + number
    assert err == ("sglang-tiered: stopped\n" if number == signal.SIGINT else "")
    assert "All answers were equal" not in out
    expect_nothing_left(temporary)


def test_demo_uses_a_running_server_without_stopping_it(
    launch: Launch, temporary: Path, tmp_path: Path
) -> None:
    memory = ("--max-total-tokens", "2048", "--tier-host-bytes", "9MiB")
    server = launch(*memory, "--tier-dir", str(tmp_path / "kv"), *ALWAYS)
    path = tmp_path / "figures.json"
    for _ in range(2):  # another run has pages of its own: the first time is the first time again
        demo = start(temporary, "--url", server.url, "--json", str(path))
        out, err = demo.communicate(timeout=400)
        assert demo.returncode == 0 and not err, err
        assert "kill -9" not in out
        rows = rows_of(path)
        assert list(rows) == list(EXPECTED)[:4]
        assert rows["first time"]["computed"] == 1 and rows["NVMe"]["nvme"] > 0.9
    assert server.generate(list(range(32, 100)), num_new=1).output_ids
    expect_nothing_left(temporary)
