"""Servers, and other programs, forked from a process that has imported SGLang already.

Of the 16 s of processor time of a start, 12 are imports. A zygote imports once and forks every
server that has its environment, and those fork their processes as every server on a CPU does. What
a user's own start does is tested by the modules that do not ask for it.

``Zygotes`` is the side of the tests; run as a script, this file is the zygote. They speak JSON, a
line each way, over the zygote's standard input and output.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import shlex
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import setproctitle

MAX_ALIVE = 3
END_DEADLINE_S = 30.0
LOOK_S = 0.02
SLOW_DISK = Path(__file__).resolve().parent / "slow_disk"

READ_LATE = (
    "ASYNC_PLATFORM_HORIZON_S",
    "ASYNC_PLATFORM_MODE",
    "ASYNC_PLATFORM_REPORT",
    "AWS_",
    "PYTEST_CURRENT_TEST",
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER",
    "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES",
    "SGLANG_TIERED_",
    "SLOW_DISK_",
)
"""Beginnings of the variables that nothing reads while it is imported. Servers that differ in any
other have another zygote."""


# ---- The side of the tests ----


class _Zygote:
    """One process that forks servers. Any thread."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._lock = threading.Lock()
        self.running: set[int] = set()  # whose end somebody may ask for
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env=environment,
            )

    def fork(self, command: list[str], environment: dict[str, str], log: Path) -> ForkedProcess:
        """Start a program that prints into ``log``."""
        pid = self._ask(command=command, environment=environment, log=str(log))
        self.running.add(pid)
        return ForkedProcess(self, pid)

    def exit_code(self, pid: int) -> int | None:
        """How a server of it ended, as ``subprocess`` counts; None while it runs."""
        code: int | None = self._ask(wait_for=pid)
        if code is not None:
            self.running.discard(pid)
        return code

    def _ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._lock:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        assert line, f"the zygote ended with {self.process.wait()}"
        return json.loads(line)


@dataclass
class ForkedProcess:
    """What ``subprocess.Popen`` is to a child, of a zygote's child."""

    zygote: _Zygote
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.zygote.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # until it was waited for, its number is nobody else's
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)


class Zygotes:
    """Those of one test process: an idle one ends where another is needed."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._alive: OrderedDict[tuple[tuple[str, str], ...], _Zygote] = OrderedDict()

    def fork(self, command: list[str], environment: dict[str, str], log: Path) -> ForkedProcess:
        """Start ``python`` with this command: a module after ``-m``, or a file, and arguments."""
        # They are read when OpenMP is loaded. Threads that spin take other servers' cores, and for
        # models this small a second thread costs more than it computes.
        environment = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", **environment}
        # Without its variables it slows nothing, so servers with them and without share a zygote.
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        if not any(Path(path).name == SLOW_DISK.name for path in paths):
            environment["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), str(SLOW_DISK)])
        key = tuple(sorted(one for one in environment.items() if not one[0].startswith(READ_LATE)))
        zygote = self._alive.pop(key, None)
        if zygote is None:
            idle = [other for other, one in self._alive.items() if not one.running]
            for other in idle[: len(self._alive) - MAX_ALIVE + 1]:
                self._alive.pop(other).process.communicate(timeout=END_DEADLINE_S)
            zygote = _Zygote(environment, self._log)
        self._alive[key] = zygote
        return zygote.fork(command, environment, log)

    def close(self) -> None:
        """Servers that still run go on."""
        for zygote in self._alive.values():
            zygote.process.communicate(timeout=END_DEADLINE_S)


# ---- The zygote ----


def _import_sglang() -> None:
    from sglang_tiered.integration import start

    start.prepare()
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401 - all models, which a scheduler imports late

    assert "prometheus_client" not in sys.modules, "a server sets first where its processes count"


def _become_program(request: dict[str, Any], set_by_imports: dict[str, str]) -> None:
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    command = request["command"]
    setproctitle.setproctitle(shlex.join(command))
    os.environ.clear()
    os.environ.update({**request["environment"], **set_by_imports})
    if "seams" in sys.modules:
        sys.modules["seams"].BED.reread(os.environ)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


def _exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> int:
    """Fork a server per request until the input ends. Returns in the children too."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    # SGLang's shutdown finds the processes it waits for by their titles, and a title needs the
    # place of the environment that a process starts with.
    setproctitle.setproctitle("zygote")
    before = dict(os.environ)
    gc.disable()  # nothing of what is imported is garbage
    _import_sglang()
    gc.freeze()  # a collection in a fork would walk all that it shares, and so copy it
    set_by_imports = dict(os.environ.items() - before.items())
    for line in requests:
        request = json.loads(line)
        if "wait_for" in request:
            answer = _exit_code(request["wait_for"])
        else:
            answer = os.fork()
            if answer == 0:
                gc.enable()
                requests.close()
                answers.close()
                _become_program(request, set_by_imports)
                return 0
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
