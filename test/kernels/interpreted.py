"""Run a test function in Triton's interpreter, which a process has from its first import or never.

``TRITON_INTERPRET=1`` is read when Triton's decorators run, at the latest when its language is
imported, and then holds for every kernel of the process, SGLang's too. So the suite's own process
stays out of it: a test marked ``@interpreted`` runs in one child that serves them all, by its name
and parameters, and reports as if it had run here. Under ``TRITON_INTERPRET=1 pytest ...`` the tests
run in place, for a debugger.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import inspect
import os
import pickle
import select
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).resolve().parent
_VARIABLE = "TRITON_INTERPRET"


def interpreted(
    function: Callable[..., None] | None = None, *, timeout_s: float = 60
) -> Callable[..., Any]:
    """Decorate a test whose parameters can be pickled; they may not be fixtures with state.
    ``timeout_s`` is the deadline of one call, the child's start not counted."""
    if function is None:
        return functools.partial(interpreted, timeout_s=timeout_s)
    if os.environ.get(_VARIABLE) == "1":
        return pytest.mark.timeout(timeout_s)(function)
    path = inspect.getsourcefile(function)
    assert path is not None

    @functools.wraps(function)
    def in_child(**parameters: Any) -> None:
        __tracebackhide__ = True
        failure = _child().call((path, function.__name__, parameters), timeout_s)
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    return in_child


class _Child:
    """A process with the interpreter. One call at a time; killed when a call is late."""

    START_S = 60.0

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, _VARIABLE: "1"},
        )
        atexit.register(self.kill)
        assert self._receive(self.START_S) == "ready"

    def call(self, request: tuple[str, str, dict[str, Any]], timeout_s: float) -> Any:
        """None, or what went wrong."""
        _send(self._process.stdin, request)
        return self._receive(timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()
        _running.clear()

    def _receive(self, timeout_s: float) -> Any:
        pipe: Any = self._process.stdout
        if not select.select([pipe], [], [], timeout_s)[0]:
            self.kill()
            return f"no answer within {timeout_s} s; the interpreter's process was killed"
        try:
            return pickle.load(pipe)
        except EOFError:
            self.kill()
            return f"the interpreter's process died with {self._process.returncode}"


_running: list[_Child] = []


def _child() -> _Child:
    if not _running:
        _running.append(_Child())
    return _running[0]


def _send(pipe: Any, message: object) -> None:
    pickle.dump(message, pipe)
    pipe.flush()


def _load(path: str) -> Any:
    """The test module of a file, once."""
    name = f"interpreted_{Path(path).stem}"
    if name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints is not an answer
    sys.path.insert(0, str(_HERE))
    import torch  # only the child needs it

    torch.set_num_threads(1)
    _send(answers, "ready")
    while True:
        try:
            path, name, parameters = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        failure = None
        try:
            getattr(_load(path), name)(**parameters)
        except BaseException:  # a skip or a failure of pytest's is one too
            failure = traceback.format_exc()
        _send(answers, failure)


if __name__ == "__main__":
    _serve()
