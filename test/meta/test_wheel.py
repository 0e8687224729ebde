"""What a build of the package holds: all of python/ and kernels/, the licence, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kit.commands import ran
from sglang_tiered.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("python", "kernels")
BESIDE = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
PACKAGE_DATA = ("py.typed", "README.md", "hardware.json", "page.html", "glossary.md", "envoy.yaml")
PIP = (sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check")
"""Without what the machine's own settings of pip say."""
BACKEND = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
STORAGE = "python/sglang_tiered/storage"
STRAY = (
    *("test/unit/test_a.py", "benchmark/a.py", "scripts/a.py", "dist/a.py", "python/a/b.py"),
    *(f"{STORAGE}/scratch/notes.md", f"{STORAGE}/scratch/a.py", f"{STORAGE}/notes.md"),
)


def modules_and_pages(root: str) -> set[str]:
    files = [path for path in (ROOT / root).rglob("*") if path.is_file()]
    wanted = [path for path in files if path.suffix == ".py" or path.name in PACKAGE_DATA]
    return {str(path.relative_to(ROOT / root)) for path in wanted}


def run(*command: str | Path, cwd: Path | None = None) -> None:
    ended = ran(*command, cwd=cwd, timeout_s=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a copy of the repository, in which whatever a build could take by mistake is there."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in SOURCE_ROOTS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for stray in STRAY:
        (tree / stray).parent.mkdir(parents=True, exist_ok=True)
        (tree / stray).write_text("")
    run(sys.executable, "-c", BACKEND, out, cwd=tree)
    return next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, without a network."""
    unpacked, out = tmp_path_factory.mktemp("unpacked"), tmp_path_factory.mktemp("wheel")
    shutil.unpack_archive(sdist, unpacked)
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    run(*PIP, "wheel", *offline, "--wheel-dir", out, *unpacked.iterdir())
    return next(out.glob("*.whl"))


def test_the_wheel_holds_package_and_pages_only(wheel: Path) -> None:
    """A room without ``__init__.py`` would be left out without a word."""
    names = set(zipfile.ZipFile(wheel).namelist())
    beside = {name for name in names if ".dist-info/" in name}
    assert names - beside == set().union(*map(modules_and_pages, SOURCE_ROOTS))
    assert {name.partition("/")[2] for name in beside} == BESIDE


def test_the_sdist_holds_the_wheels_sources_only(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    generated = {name for name in names if name.startswith("sglang_tiered.egg-info/")}
    sources = {f"{root}/{name}" for root in SOURCE_ROOTS for name in modules_and_pages(root)}
    files = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert names - generated == sources | files


COMPLETE = {"cluster": ("published",), "completion": ("bash",), "keygen": ("--out", "keys")}
"""Command lines of those that look at it before they need a package."""


def test_a_command_without_packages_says_so(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path)
    into = (*PIP, "--python", tmp_path / "bin" / "python")
    run(*into, "install", "--no-deps", "--no-index", "--no-compile", wheel)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    for flag, said in (("--help", " keygen "), ("--version", "sglang is missing (required: ==")):
        ended = ran(tmp_path / "bin" / "sglang-tiered", flag, env=environment)
        assert (ended.returncode, ended.stderr) == (0, "") and said in ended.stdout
    for name in COMMANDS:
        words = (name, *COMPLETE.get(name, ()))
        ended = ran(tmp_path / "bin" / "sglang-tiered", *words, env=environment)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), name
        needs = (
            rf"sglang-tiered: .*{name} needs the package [\w-]+.*pip install .*sglang-tiered.*\n"
        )
        assert re.fullmatch(needs, ended.stderr), ended.stderr
