"""Every seam of SGLang that this package relies on, compared with the SGLang that is installed.

Where ``compat`` stops a server at the first difference, this lists all. It has each signature of
``compat`` and of the parts that only some servers load, and each name that ``integration`` imports.
``python -m sglang_tiered.integration.seams`` prints them as JSON, for ``scripts/compat``; it loads
the plugin too, as every process of a server does.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import io
import json
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sglang_tiered.integration import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


_HERE = Path(__file__).parent
_PACKAGE = "sglang_tiered.integration"
_TABLES = ("SIGNATURES", "_SIGNATURES")

Status = Literal["ok", "changed", "missing", "unchecked"]


@dataclass(frozen=True)
class Seam:
    """One name of SGLang. ``where``: the module of ours that relies on it; ``found``: what SGLang
    has in its place, or why nothing is there."""

    name: str
    where: str
    status: Status
    expected: str = ""
    found: str = ""


def compare(signatures: Mapping[str, tuple[str, ...]], where: str) -> list[Seam]:
    """Compare each signature of a table."""
    return [_compared(target, expected, where) for target, expected in signatures.items()]


def _compared(target: str, expected: tuple[str, ...], where: str) -> Seam:
    wanted = f"({', '.join(expected)})"
    try:
        found = compat.parameters_of(target)
    except ImportError as error:  # of a package that SGLang requires on other machines
        return Seam(target, where, "unchecked", wanted, str(error))
    if isinstance(found, str):
        return Seam(target, where, "missing", wanted, found)
    if {*expected} <= {*found}:
        return Seam(target, where, "ok", wanted)
    return Seam(target, where, "changed", wanted, f"({', '.join(found)})")


def tables() -> Iterator[tuple[str, Mapping[str, tuple[str, ...]] | ImportError]]:
    """Yield each table of signatures with its module, or why the module does not import here."""
    for path in sorted(_HERE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [name for name in _TABLES if name in _assigned(tree)]
        if not names:
            continue
        where = _module_of(path)
        try:
            module = importlib.import_module(where)
        except ImportError as error:
            yield where, error
            continue
        for name in names:
            yield where, getattr(module, name)


def _assigned(tree: ast.Module) -> set[str]:
    """The names that a module assigns at its top."""
    targets: list[ast.expr] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _module_of(path: Path) -> str:
    parts = path.relative_to(_HERE).with_suffix("").parts
    return ".".join((_PACKAGE, *parts)).removesuffix(".__init__")


# ---- Imports ----


def imports_of(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield module, name ("" for the module itself) and importer of what the modules below a folder
    import of SGLang, in functions too, but not for types."""
    for path in sorted(folder.rglob("*.py")):
        where = _module_of(path)
        for node in _executed(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and _is_sglang(node.module):
                yield from ((str(node.module), name.name, where) for name in node.names)
            elif isinstance(node, ast.Import):
                yield from ((name.name, "", where) for name in node.names if _is_sglang(name.name))


def _is_sglang(module: str | None) -> bool:
    return (module or "").split(".")[0] == "sglang"


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """A tree without what is only there for a type checker."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _executed(child)


def _imported(module: str, name: str, where: str) -> Seam:
    label = f"from {module} import {name}" if name else f"import {module}"
    try:
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except ImportError as error:
        status: Status = "missing" if compat.of_sglang(error) else "unchecked"
        return Seam(label, where, status, found=str(error))
    return Seam(label, where, "ok")


# ---- As a program ----


def compare_all() -> list[Seam]:
    """Compare everything. Imports most of SGLang."""
    seams: list[Seam] = []
    for where, table in tables():
        if isinstance(table, ImportError):
            seams.append(Seam(f"table of {where}", where, "unchecked", found=str(table)))
        else:
            seams += compare(table, where)
    importers: dict[tuple[str, str], str] = {}
    for module, name, where in imports_of(_HERE):
        importers.setdefault((module, name), where)
    return seams + [_imported(*imported, where) for imported, where in importers.items()]


def report() -> dict[str, Any]:
    """Load the plugin as a server does and compare everything: what ``main`` prints."""
    from sglang_tiered.integration import plugin

    def problem(start: Callable[[], object]) -> str:
        try:
            start()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    failure = problem(plugin.activate_platform)
    seams = compare_all()
    return {
        "version": importlib.metadata.version("sglang"),
        "plugin": failure or problem(plugin.register),
        "seams": [asdict(seam) for seam in seams],
    }


def main() -> int:
    """Print the report as JSON. Nothing else may write there: SGLang prints while it loads."""
    warnings.simplefilter("ignore")
    with redirect_stdout(io.StringIO()):
        found = report()
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
