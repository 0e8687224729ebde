"""Runs a command line as a user types it: in a shell, with a home directory of its own, interrupted
by Ctrl-C; and finds what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from documented_commands import ROOT

from server_process import START_DEADLINE_S, Server

COMMAND_DEADLINE_S = 120.0
# A server finishes what it is computing and writing; SGLang gives itself up to 30 s for that.
STOP_DEADLINE_S = 60.0
_PRINTED = re.compile(r"^try:\n(?P<command>(?: +\S.*\n)+)", re.MULTILINE)


@dataclass
class Desk:
    """Where commands are typed: a folder that looks like the repository and may be written to, and
    a home directory that knows of no earlier server."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def lay_out(cls, place: Path, model: Path) -> Desk:
        """Make ``M``, the model in the pages' commands, the demo model."""
        folder, home = place / "repository", place / "home"
        for path in (folder, home):
            path.mkdir()
        # What git tracks: a clone in use has stores and keys of its own beside it.
        listed = subprocess.run(
            ["git", "-C", ROOT, "ls-files"], check=True, capture_output=True, text=True
        )
        for name in {line.partition("/")[0] for line in listed.stdout.splitlines()}:
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(_same_environment(place / "environment"))
        (folder / "M").symlink_to(model)
        # Otherwise curl succeeds at whatever it is answered.
        (place / ".curlrc").write_text(f"fail-with-body\nmax-time = {COMMAND_DEADLINE_S:.0f}\n")
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("SGLANG_", "AWS_"))}
        return cls(
            folder,
            {
                **inherited,
                "HOME": str(home),
                "XDG_CACHE_HOME": str(home / ".cache"),
                "SGLANG_TIERED_DEMO_MODEL": "random",  # at once, and without a network
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
        )

    def run(self, line: str) -> str:
        """Type a command and wait for it. Returns what it printed; it must succeed."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env={**self.environment, "CURL_HOME": str(self.folder.parent)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_DEADLINE_S,
        )
        assert done.returncode == 0, f"{line}\nexit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, line: str, port: int, log: Path) -> Server:
        """Type a command that goes on. It leads a session, as that of a terminal does."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", line],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return Server(port, process, log, [line])

    def try_what_is_printed(self, server: Server) -> str:
        """Wait for the line that a server's launcher says to try, and type it."""
        return self.run(wait_for(_PRINTED, server)["command"])


def _same_environment(made: Path) -> Path:
    """An environment whose Python is the one of ``.venv``, by its own path: by another, SGLang's
    extension would be built anew."""
    (made / "bin").mkdir(parents=True)
    programs = ROOT / ".venv" / "bin"
    for program in programs.iterdir() if programs.is_dir() else ():
        place = made / "bin" / program.name
        if program.name.startswith("python"):
            place.write_text(f'#!/bin/sh\nexec {shlex.quote(str(program))} "$@"\n')
            place.chmod(0o755)
        else:
            place.symlink_to(program)
    return made


def wait_for(pattern: re.Pattern[str], server: Server) -> re.Match[str]:
    """Until the command has printed this."""
    deadline = time.monotonic() + 2 * START_DEADLINE_S  # scripts/serve-pd starts two
    while (found := pattern.search(server.log)) is None:
        assert server.process.poll() is None, f"it ended:\n{server.log[-4000:]}"
        assert time.monotonic() < deadline, f"{pattern.pattern} not in:\n{server.log[-4000:]}"
        time.sleep(0.1)
    return found


def num_tokens(text: str, row: str) -> int:
    """Tokens that a row of a server's banner names."""
    found = re.search(rf"^  {row} +([\d,]+) tokens", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1].replace(",", ""))


def interrupt(server: Server) -> None:
    """Ctrl-C. Fails if the command, or anything it started, is there after a while."""
    started = _session(server) | set(psutil.Process(server.process.pid).children(recursive=True))
    os.killpg(server.process.pid, signal.SIGINT)
    deadline = time.monotonic() + STOP_DEADLINE_S
    while (left := _alive(started | _session(server))) or server.process.poll() is None:
        if time.monotonic() > deadline:
            about = [f"{process.pid} {process.name()}" for process in left]
            for process in left:
                process.kill()
            raise AssertionError(f"left behind: {about}\n{server.log[-4000:]}")
        time.sleep(0.05)


def _session(server: Server) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == server.process.pid:
                found.add(process)
    return found


def _alive(processes: set[psutil.Process]) -> set[psutil.Process]:
    alive = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.add(process)
    return alive
