"""Prints how large the house is, and fails where a figure is above the one that is held here.

A figure may fall: lower the held one then. It rises only with a reason, in the commit that raises
the held one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ROOT / "python" / "sglang_tiered"
MAX_WORDS = 30
SMALL_LINES = 60
HELD = {
    "product lines": 56_000,
    "product files": 224,
    "product classes": 510,
    "class names defined more than once": 6,
    "product modules with one importer": 48,
    f"product files under {SMALL_LINES} lines": 30,
    f"docstring sentences over {MAX_WORDS} words": 0,
    "lines of the longest file": 600,
    "product files of the largest folder": 20,
    "laboratory lines": 10_590,
    "kernel lines": 2_880,
    "benchmark lines": 18_220,
    "test lines": 57_500,
    "Markdown bytes": 230_490,
}


def tracked(pattern: str) -> list[Path]:
    """Files of the repository whose name matches, sorted."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({path for name in listed.splitlines() if (path := ROOT / name).exists()})


def long_sentences(tree: ast.Module) -> int:
    """Sentences of docstrings with more words than ``MAX_WORDS``; tables do not count."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [
        ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)
    ]
    sentences = [one for text in texts for one in re.split(r"(?<=[.!?])\s+", text)]
    return sum(len(one.split()) > MAX_WORDS for one in sentences if "|" not in one)


def measure() -> dict[str, int]:
    """The figures, by the names in ``HELD``."""
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in tracked("*.py")}
    product = {
        path: ast.parse(path.read_text(encoding="utf-8")) for path in tracked(f"{PRODUCT}/*.py")
    }
    modules = {
        ".".join(path.relative_to(PRODUCT.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in product
    }
    importers: dict[str, set[Path]] = defaultdict(set)
    classes: Counter[str] = Counter()
    for path, tree in product.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")] += 1
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    importers[full if full in modules else node.module].add(path)

    def of(folder: str) -> int:
        return sum(number for path, number in lines.items() if path.is_relative_to(ROOT / folder))

    folders = Counter(path.parent for path in product)
    return {
        "product lines": of("python/sglang_tiered"),
        "product files": len(product),
        "product classes": classes.total(),
        "class names defined more than once": sum(number > 1 for number in classes.values()),
        "product modules with one importer": sum(
            len(importers[name]) == 1 and not name.endswith("__main__") for name in modules
        ),
        f"product files under {SMALL_LINES} lines": sum(
            lines[path] < SMALL_LINES for path in product
        ),
        f"docstring sentences over {MAX_WORDS} words": sum(map(long_sentences, product.values())),
        "lines of the longest file": max(lines.values()),
        "product files of the largest folder": max(folders.values()),
        "laboratory lines": of("python/sglang_tiered_lab"),
        "kernel lines": of("kernels"),
        "benchmark lines": of("benchmark"),
        "test lines": of("test"),
        "Markdown bytes": sum(path.stat().st_size for path in tracked("*.md")),
    }


def main() -> int:
    figures = measure()
    for name, figure in figures.items():
        print(f"{figure:>8,}  {name}")
    above = [name for name, figure in figures.items() if figure > HELD[name]]
    for name in above:
        held = f"above the {HELD[name]:,} held in scripts/house.py"
        print(
            f"{name}: {figures[name]:,} is {held}; make it smaller, or say why and raise it there"
        )
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
