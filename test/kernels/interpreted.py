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
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

_VARIABLE = "TRITON_INTERPRET"
START_S = 60.0


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
        child = _child()
        try:
            failure = child.submit(_call, path, function.__name__, parameters).result(timeout_s)
        except (TimeoutError, BrokenProcessPool) as error:
            _child.cache_clear()
            for process in list((child._processes or {}).values()):
                process.kill()
            failure = f"the interpreter's process was late, or died: {error!r}"
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    return in_child


@functools.cache
def _child() -> ProcessPoolExecutor:
    """A process with the interpreter."""
    made = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    atexit.register(made.shutdown)
    made.submit(_start).result(START_S)
    return made


def _start() -> None:
    os.environ[_VARIABLE] = "1"
    os.dup2(2, 1)  # what a kernel prints is no news
    import torch  # only the child needs it

    torch.set_num_threads(1)


def _call(path: str, name: str, parameters: dict[str, Any]) -> str | None:
    """None, or what went wrong."""
    try:
        getattr(_load(path), name)(**parameters)
    except BaseException:  # a skip or a failure of pytest's is one too
        return traceback.format_exc()
    return None


@functools.cache
def _load(path: str) -> Any:
    """The test module of a file, once."""
    name = f"interpreted_{Path(path).stem}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
