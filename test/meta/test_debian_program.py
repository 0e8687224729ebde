"""Scripts named after programs find them, or say in one sentence why there is none to be had."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PROGRAMS = {
    "redis-server": ("redis-server", "REDIS_SERVER"),
    "promtool": ("prometheus", "PROMTOOL"),
    "prometheus": ("prometheus", "PROMETHEUS"),
}


def run(program: str, *arguments: str, path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Where nothing but bash and what lies in ``path`` can be found."""
    if not (path / "bash").exists():
        (path / "bash").symlink_to(shutil.which("bash") or "")
    variables = {name for _, name in PROGRAMS.values()}
    kept = {name: value for name, value in os.environ.items() if name not in variables}
    return subprocess.run(
        [SCRIPTS / program, *arguments],
        env={**kept, "PATH": str(path), **more},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def executable(path: Path) -> Path:
    path.write_text('#!/bin/sh\necho "$0 was told $*"\nexit 3\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_machine_without_apt_is_told_so(name: str, tmp_path: Path) -> None:
    package, variable = PROGRAMS[name]
    ended = run(name, path=tmp_path)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == (
        f"scripts/{name}: no {name} on PATH, and no apt-get to fetch one; install Debian's "
        f"{package}, or set {variable}.\n"
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_path_is_used(name: str, tmp_path: Path) -> None:
    program = executable(tmp_path / name)
    assert run(name, path=tmp_path).stdout == f"{program}\n"
    ended = run(name, "check", "a b", path=tmp_path)
    assert (ended.stdout, ended.returncode) == (f"{program} was told check a b\n", 3)


def test_a_named_program_goes_before_the_path(tmp_path: Path) -> None:
    executable(tmp_path / "promtool")
    (tmp_path / "own").mkdir()
    own = executable(tmp_path / "own" / "promtool")
    assert run("promtool", path=tmp_path, PROMTOOL=str(own)).stdout == f"{own}\n"


def test_valkey_stands_in_for_redis(tmp_path: Path) -> None:
    program = executable(tmp_path / "valkey-server")
    assert run("redis-server", path=tmp_path).stdout == f"{program}\n"
