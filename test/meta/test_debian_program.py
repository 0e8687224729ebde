"""Scripts named after programs find them, or say in one sentence why there is none to be had."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from kit.commands import ran

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "promtool"


def run(*arguments: str, path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Where nothing but bash and what lies in ``path`` can be found."""
    if not (path / "bash").exists():
        (path / "bash").symlink_to(shutil.which("bash") or "")
    kept = {name: value for name, value in os.environ.items() if name != "PROMTOOL"}
    return ran(SCRIPT, *arguments, env={**kept, "PATH": str(path), **more})


def executable(path: Path, text: str = 'echo "$0 was told $*"; exit 3') -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_cache_that_others_prepared_is_not_run(tmp_path: Path) -> None:
    """Everybody can make a folder or a link of that name in /tmp."""
    for tool in ("id", "mkdir"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    for tool in ("apt-get", "apt-cache", "flock"):
        executable(tmp_path / tool)
    executable(tmp_path / "dpkg", "echo any")
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
    ended = run(path=tmp_path, **nowhere)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no directory to keep one in can be written" in ended.stderr
    cache.unlink()
    (tmp_path / "theirs").rename(cache)
    assert run(path=tmp_path, **nowhere).stdout.endswith("/promtool\n")
