"""Scripts named after programs find them, or say in one sentence why there is none to be had."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kit.commands import ran

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PROGRAMS = {
    "redis-server": ("redis-server", "REDIS_SERVER"),
    "promtool": ("prometheus", "PROMTOOL"),
    "prometheus": ("prometheus", "PROMETHEUS"),
    "chromium-headless-shell": ("chromium-headless-shell", "CHROMIUM_HEADLESS_SHELL"),
}


def run(program: str, *arguments: str, path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Where nothing but bash and what lies in ``path`` can be found."""
    if not (path / "bash").exists():
        (path / "bash").symlink_to(shutil.which("bash") or "")
    variables = {name for _, name in PROGRAMS.values()}
    kept = {name: value for name, value in os.environ.items() if name not in variables}
    return ran(SCRIPTS / program, *arguments, env={**kept, "PATH": str(path), **more})


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


def test_a_cache_that_others_prepared_is_not_run(tmp_path: Path) -> None:
    """Everybody can make a folder or a link of that name in /tmp."""
    for tool in ("id", "mkdir"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    for tool in ("apt-get", "apt-cache", "flock", "dpkg"):
        executable(tmp_path / tool)
    (tmp_path / "dpkg").write_text("#!/bin/sh\necho any\n")
    say = '. /etc/os-release && printf %s "${ID:-debian}-${VERSION_ID:-0}"'
    release = ran("bash", "-c", say, check=True).stdout
    theirs = tmp_path / "theirs" / "sglang-tiered" / f"prometheus-{release}-any"
    theirs.mkdir(parents=True)
    executable(theirs / "promtool")
    own = tmp_path / "tmp"
    own.mkdir()
    nowhere = {"HOME": "", "XDG_CACHE_HOME": "", "TMPDIR": str(own)}
    cache = own / f"cache-{os.getuid()}"
    cache.symlink_to(tmp_path / "theirs")
    ended = run("promtool", path=tmp_path, **nowhere)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no directory to keep one in can be written" in ended.stderr
    cache.unlink()
    (tmp_path / "theirs").rename(cache)
    assert run("promtool", path=tmp_path, **nowhere).stdout.endswith("/promtool\n")
