"""Files are named for what they do, no folder shadows a package, no room of tests is left out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kit.commands import ran

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("python", "kernels", "scripts", "benchmark", "test")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
# A name that says nothing gathers everything.
SAYS_NOTHING = {"utils", "util", "common", "misc", "helpers", "helper"}
MAX_WORDS = 8


@pytest.mark.parametrize("folder", ["kernels", "test", "benchmark", "scripts"])
def test_no_top_folder_is_a_package(folder: str) -> None:
    """`kernels/__init__.py` hides a dependency of SGLang, `test/__init__.py` the standard one."""
    assert not (ROOT / folder / "__init__.py").exists()
    if folder != "kernels":  # its package, sglang_tiered_kernels, is one
        assert not list((ROOT / folder).rglob("__init__.py"))


def test_names_say_something_and_stay_short() -> None:
    for path in FILES:
        assert not SAYS_NOTHING & set(path.relative_to(ROOT).with_suffix("").parts), path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_long = node.name.startswith("test_") and node.name.count("_") > MAX_WORDS
                assert not is_long, f"{path}: {node.name} has more than {MAX_WORDS} words"


SCRIPTS = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix]


@pytest.mark.parametrize("path", [*sorted(SCRIPTS), ROOT / ".ci/run"], ids=lambda path: path.name)
def test_every_script_runs_and_stops_at_errors(path: Path) -> None:
    assert path.stat().st_mode & 0o111, "not executable"
    assert ran("bash", "-n", path).returncode == 0
    text = path.read_text(encoding="utf-8")
    assert "\nset -" in text and "uo pipefail\n" in text


def test_the_gate_forgets_no_folder_of_tests() -> None:
    """``gpu`` and ``soak`` have commands of their own."""
    rooms = {path.name for path in (ROOT / "test").iterdir() if any(path.glob("**/test_*.py"))}
    gate = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    (line,) = [line for line in gate.splitlines() if line.strip().startswith("for room in ")]
    assert set(line.split(";")[0].split()[3:]) == rooms - {"gpu", "soak"}
