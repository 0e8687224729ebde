"""Files stay small and named for what they do, and no folder shadows a package."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("python", "kernels", "scripts", "benchmark")
# A name that says nothing gathers everything.
SAYS_NOTHING = {"utils", "util", "common", "misc", "helpers", "helper"}
MAX_WORDS = 8
SHORT_NAMED = (
    "async_platform",
    "contract",
    "fault",
    "gpu",
    "integration",
    "kernels",
    "meta",
    "property",
    "soak",
    "unit",
)


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def named(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("folder", ["kernels", "test", "benchmark", "scripts"])
def test_no_top_folder_is_a_package(folder: str) -> None:
    """`kernels/__init__.py` hides a dependency of SGLang, `test/__init__.py` the standard one."""
    inits = [ROOT / folder / "__init__.py"]
    if folder != "kernels":  # its package, sglang_tiered_kernels, is one
        inits = list((ROOT / folder).rglob("__init__.py"))
    assert not named([path for path in inits if path.exists()])


def test_no_module_has_a_name_that_says_nothing() -> None:
    bad = [
        path
        for path in python_files(*SOURCE_FOLDERS, "test")
        if SAYS_NOTHING & set(path.relative_to(ROOT).with_suffix("").parts)
    ]
    assert not named(bad)


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        path
        for path in python_files(*SOURCE_FOLDERS, "test")
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not named(silent)


def test_every_module_defers_its_annotations() -> None:
    eager = [
        path
        for path in python_files(*SOURCE_FOLDERS, "test")
        if "\nfrom __future__ import annotations\n" not in path.read_text(encoding="utf-8")
    ]
    assert not named(eager)


@pytest.mark.parametrize("folder", SHORT_NAMED)
def test_names_of_tests_are_short(folder: str) -> None:
    tests = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in python_files(f"test/{folder}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]
    assert tests, f"test/{folder} has no tests"
    long = [test for test in tests if test.rpartition(": test_")[2].count("_") >= MAX_WORDS]
    assert not long, f"more than {MAX_WORDS} words:\n" + "\n".join(long)


@pytest.mark.parametrize(
    "script",
    [
        *(
            f"scripts/{path.name}"
            for path in sorted((ROOT / "scripts").iterdir())
            if "." not in path.name and path.is_file()
        ),
        ".ci/run",
    ],
)
def test_every_script_runs_and_stops_at_errors(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111, "not executable"
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    text = path.read_text(encoding="utf-8")
    assert "\nset -" in text
    assert "uo pipefail\n" in text


def test_the_gate_forgets_no_folder_of_tests() -> None:
    """``gpu`` and ``soak`` have commands of their own."""
    rooms = {path.name for path in (ROOT / "test").iterdir() if any(path.glob("**/test_*.py"))}
    gate = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    (line,) = [line for line in gate.splitlines() if line.strip().startswith("for room in ")]
    assert set(line.split(";")[0].split()[3:]) == rooms - {"gpu", "soak"}
