"""An asynchronous CPU for servers started with this folder first on ``PYTHONPATH``.

Python imports this module in every process of the server. With ``ASYNC_PLATFORM_SEED``, streams,
events and copies of torch's CPU become those of ``device.py`` and SGLang is watched by ``seams.py``;
without it nothing happens. The settings:

| variable | what |
|---|---|
| ``ASYNC_PLATFORM_SEED`` | a number: the same operations get the same delays |
| ``ASYNC_PLATFORM_MODE`` | ``random`` (default), ``late``: copies to host memory as late as allowed, ``late-forward``: forwards as late, copies to host memory at once, ``all-late`` |
| ``ASYNC_PLATFORM_HORIZON_S`` | the longest delay; 0.15 |
| ``ASYNC_PLATFORM_REPORT`` | the file for violations and seams that ran |
| ``ASYNC_PLATFORM_DRAIN`` | a file that, once it is there, makes an idle scheduler empty its tree |

Only one ``sitecustomize`` is imported, so this one executes the next of the path, the slow disks.
"""  # noqa: E501

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

FOLDER = str(Path(__file__).resolve().parent)
WATCHED = ("torch.cpu", "sglang.", "sglang_tiered.")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith(WATCHED):
            return None
        import seams

        after = seams.AFTER.get(name)
        if after is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            after(module)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def _execute_next() -> None:
    folders = [folder for folder in sys.path if str(Path(folder).resolve()) != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("ASYNC_PLATFORM_SEED"):
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)
    sys.meta_path.insert(0, _Finder())
_execute_next()
