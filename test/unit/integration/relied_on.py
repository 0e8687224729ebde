"""Prints as JSON what ``integration`` relies on of SGLang: beside the report of ``seams``, which
names are asserted, hooked and overridden. A program, as it imports every module of ours."""

from __future__ import annotations

import gc
import importlib
import inspect
import io
import json
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

gc.disable()  # nothing of what is imported is garbage
from sglang_tiered import integration  # noqa: E402
from sglang_tiered.integration import seams  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


def asserted() -> list[str]:
    """Dotted names of all that some table asserts."""
    return [
        target.replace(":", ".")
        for _, table in seams.tables()
        if not isinstance(table, ImportError)
        for target in table
    ]


def hooked() -> list[str]:
    """What the plugin, which is loaded, has hooked."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return list(HookRegistry._hooks)


def our_modules() -> Iterator[ModuleType]:
    """Of ``integration``, those that this machine can import."""
    (folder,) = map(Path, integration.__path__)
    for path in sorted(folder.rglob("*.py")):
        parts = (*integration.__name__.split("."), *path.relative_to(folder).with_suffix("").parts)
        try:
            yield importlib.import_module(".".join(parts).removesuffix(".__init__"))
        except ImportError as error:
            assert error.name == "sgl_kernel", error


def overridden() -> dict[str, list[str]]:
    """Methods of ours that replace one of SGLang's: all names that it has there."""
    found: dict[str, list[str]] = {}
    for module in our_modules():
        for ours in vars(module).values():
            if not inspect.isclass(ours) or ours.__module__ != module.__name__:
                continue
            above = [base for base in ours.__mro__ if base.__module__.startswith("sglang.")]
            for name, value in vars(ours).items():
                if name.startswith("__") or not is_method(value):
                    continue
                if any(name in vars(base) for base in above):
                    found[f"{ours.__qualname__}.{name}"] = [
                        f"{base.__module__}.{base.__qualname__}.{name}" for base in above
                    ]
    return found


def is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | staticmethod | classmethod)


def main() -> None:
    warnings.simplefilter("ignore")
    with redirect_stdout(io.StringIO()):
        report = seams.report()
        report |= {"asserted": asserted(), "hooked": hooked(), "overridden": overridden()}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
