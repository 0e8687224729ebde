"""What ``docs/architecture.md`` names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ROOT / "python" / "sglang_tiered"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@cache
def members() -> dict[str, set[str]]:
    """Return what each class of the product defines, what its bases here define included."""
    found: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for path in PRODUCT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            names = found.setdefault(node.name, set())
            bases.setdefault(node.name, []).extend(ast.unparse(base) for base in node.bases)
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(part.name)
                elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    names.add(part.attr)
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    names.add(part.target.id)
    for name, parents in bases.items():
        for parent in parents:
            found[name] |= found.get(parent.split("[")[0], set())
    return found


def quoted(pattern: str) -> list[str]:
    return sorted(
        {name for name in re.findall(r"`([^`\n]+)`", PAGE) if re.fullmatch(pattern, name)}
    )


def test_page_names_members_that_classes_have() -> None:
    named = [name for name in quoted(r"[A-Z]\w+\.\w+") if not name.endswith((".md", ".py"))]
    assert len(named) > 40
    lacking = [
        name for name in named if name.split(".")[1] not in members().get(name.split(".")[0], set())
    ]
    assert not lacking


def test_page_names_files_that_exist() -> None:
    named = quoted(r"[\w/]+\.py")
    files = {str(path.relative_to(PRODUCT)) for path in PRODUCT.rglob("*.py")}
    assert len(named) > 30
    assert not [
        name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)
    ]
