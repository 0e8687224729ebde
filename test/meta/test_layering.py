"""Imports point one way. A walk over every import statement under python/ and kernels/, those for
types alone too. Nothing of the server imports the laboratory, a package beside it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = (ROOT / "python", ROOT / "kernels")
OURS = "sglang_tiered"
KERNELS = "sglang_tiered_kernels"
LAB = "sglang_tiered_lab"

# The only rooms that may import a dependency whose presence elsewhere would spread it.
HOMES = {
    "sglang": {"integration", "launch_server"},
    "torch": {"integration", "launch_server", KERNELS},
    "triton": {KERNELS},
    "zmq": {"route", "sharing", "transfer", "wire"},
    "redis": {"sharing"},
}

# The rooms a room may import. Modules at the top of the package (config, errors, metrics) are free
# to all, and are rooms of their own here so that they cannot lead around the rule.
MAY_IMPORT = {
    "__main__": {"tools"},
    "": {"integration"},  # the package itself, of which ``Engine`` is an attribute
    "api": {"policy"},  # whose record is an answer
    "client": {"api", "policy"},
    "demo": {"client", "tools"},
    "completion": {"__main__", "tools"},  # parsers by their names in the list of commands
    "launch_server": {"integration", "tools"},
    "integration": {
        "api",
        "client",
        "codecs",
        "policy",
        "sharing",
        "storage",
        "tools",  # which says why a request was slow
        "transfer",
        "wire",
        KERNELS,
    },
    "route": {"policy", "sharing", "tools", "wire"},
    "sharing": {"storage", "wire"},
    "transfer": {"codecs", "wire"},
    "storage": {"codecs"},
    "codecs": set(),
    "policy": set(),
    "wire": set(),
    "tools": {"storage", "wire"},
    KERNELS: set(),
    LAB: set(),
    f"{LAB}.trace": {"policy", "storage", "tools"},
    f"{LAB}.cluster": {"policy", "tools", f"{LAB}.trace"},
}
# Likewise within ``integration``: its rooms, and the modules at its door.
INTEGRATION = {
    "plugin": {"attention", "cache", "compat", "hooks", "platforms"},
    "hooks": {"admin", "cache", "disaggregation", "identity", "observe", "platforms"}
    | {"scheduler_messages"},
    "scheduler_messages": {"admin", "attention", "cache", "disaggregation", "identity", "observe"}
    | {"ranks"},
    "engine": {"admin", "resolve", "start"},
    "resolve": {"attention", "platforms", "start", "storage"},
    "start": {"compat", "platforms", "plugin", "storage"},
    "admin": {"cache", "identity", "ranks", "storage"},
    "disaggregation": {"cache", "compat", "identity", "observe"},
    "platforms": {"cache", "compat", "identity"},
    "cache": {"compat", "identity", "observe", "ranks", "storage"},
    "ranks": set(),
    "observe": {"compat", "storage"},
    "storage": {"identity", "ranks"},
    "attention": {"compat"},
    "identity": set(),
    "compat": set(),
    "seams": {"compat", "plugin"},
}
# Above the package, or beside it: nothing in it may know them.
OUTSIDE = {"test", "benchmark", "scripts"}


@cache
def imported_modules(source: str, module: str, is_package: bool) -> tuple[tuple[int, str], ...]:
    """Absolute dotted names with their lines; `from a import b` gives both a and a.b. Each file is
    walked once, however many tests ask."""
    return tuple(_imported_modules(ast.parse(source), module, is_package))


def _imported_modules(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *(node.module.split(".") if node.module else [])])
            yield node.lineno, origin
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            name = node.args[0]
            if (isinstance(name, ast.Constant) and isinstance(name.value, str)) and (
                ast.unparse(node.func) in {"importlib.import_module", "import_module", "__import__"}
            ):
                yield node.lineno, name.value


def room_of(module: str) -> str | None:
    """The room a module of ours is in; None for the package itself and for other people's."""
    parts = module.split(".")
    if parts[0] == KERNELS:
        return KERNELS
    if parts[0] == LAB:
        return ".".join(parts[:2])
    return parts[1] if parts[0] == OURS and len(parts) > 1 else None


def inner_room_of(module: str) -> str | None:
    """Likewise within ``integration``."""
    parts = module.split(".")
    return parts[2] if parts[:2] == [OURS, "integration"] and len(parts) > 2 else None


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    here = room_of(module)
    found: dict[tuple[int, str], str] = {}
    for line, target in imported_modules(source, module, is_package):
        top = target.split(".")[0]
        there = room_of(target)
        reason = None
        if top in HOMES and here not in HOMES[top]:
            reason = f"{top} belongs in {', '.join(sorted(HOMES[top]))} only"
        elif top in OUTSIDE:
            reason = f"nothing imports {top}"
        elif here == KERNELS and top in (OURS, LAB):
            reason = f"kernels know nothing of {top}"
        elif top == LAB and not module.startswith(LAB):
            reason = f"the server knows nothing of {LAB}"
        elif there in MAY_IMPORT and there != here and there not in MAY_IMPORT.get(here or "", ()):
            reason = f"{here or OURS} must not import {there}"
        elif there == here == "integration":
            inner, other = inner_room_of(module), inner_room_of(target)
            if inner and other and inner != other and other not in INTEGRATION.get(inner, ()):
                reason = f"{inner} must not import {other}"
        if reason:
            found.setdefault((line, reason), f"{module}:{line}: imports {target}: {reason}")
    return list(found.values())


def modules() -> Iterator[tuple[Path, str, bool]]:
    for root in SOURCE_ROOTS:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            yield path, ".".join(parts[:-1] if is_package else parts), is_package


def test_no_module_imports_against_the_direction() -> None:
    checked = [
        line
        for path, module, is_package in modules()
        for line in violations(path.read_text(encoding="utf-8"), module, is_package)
    ]
    assert not checked, "\n".join(checked)


def test_only_the_command_table_names_the_laboratory() -> None:
    """By a string, which no import statement shows: it is imported when its command is typed."""
    naming = [
        module
        for path, module, _ in modules()
        if module.split(".")[0] != LAB and LAB in path.read_text(encoding="utf-8")
    ]
    assert naming == [f"{OURS}.__main__"]


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = {module for _, module, _ in modules()}
    imports: dict[str, set[str]] = {}
    for path, module, is_package in modules():
        statements: dict[int, list[str]] = {}
        source = path.read_text(encoding="utf-8")
        for line, target in imported_modules(source, module, is_package):
            statements.setdefault(line, []).append(target)
        edges = imports[module] = set()
        for origin, *names in statements.values():
            edges.update(name for name in names if name in known)
            if origin in known and not known.issuperset(names or [""]):  # for a name within it
                edges.add(origin)
        edges.discard(module)
        if is_package:  # its own modules import nothing of it but each other
            imports[module] = {edge for edge in edges if not edge.startswith(f"{module}.")}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_every_room_of_integration_has_a_floor() -> None:
    rooms = {inner_room_of(module) for _, module, _ in modules()} - {None}
    assert rooms == set(INTEGRATION)


CAUGHT = [
    ("sglang_tiered.storage.base", "from sglang.srt.mem_cache import registry"),
    ("sglang_tiered.config", "import torch"),
    ("sglang_tiered.storage.base", "from ..policy import admission"),
    ("sglang_tiered.storage.base", "import sglang_tiered.transfer.messages"),
    ("sglang_tiered.config", "from .integration import compat"),
    ("sglang_tiered.tools.machine", "from sglang_tiered_lab.unheard import of"),
    ("sglang_tiered_lab.trace.replay", "from ..cluster import plan"),
    ("sglang_tiered.integration.hooks", "from .. import launch_server"),
    ("sglang_tiered.integration.storage.backend", "from ..cache import load_planner"),
    ("sglang_tiered.storage.base", "from test.unit import double"),
    ("sglang_tiered_kernels.page_copy.interface", "from sglang_tiered.errors import X"),
    ("sglang_tiered.policy.admission", "def late():\n    import sglang.srt\n"),
    ("sglang_tiered.policy.admission", "import importlib\nimportlib.import_module('torch')"),
    ("sglang_tiered.storage.base", "if TYPE_CHECKING:\n    import torch\n"),
]


@pytest.mark.parametrize(("module", "source"), CAUGHT)
def test_an_import_against_the_direction_is_caught(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1, (module, source)


def test_a_packages_relative_import_counts_from_itself() -> None:
    source = "from .base import TierEngine\nfrom ..policy import admission"
    assert violations(source, "sglang_tiered.storage", is_package=True) == [
        "sglang_tiered.storage:2: imports sglang_tiered.policy: storage must not import policy"
    ]
