"""What a build of the package holds: all of python/ and kernels/, the licence, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kit.commands import ran
from sglang_tiered.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("python", "kernels")
BESIDE_THE_PACKAGE = {
    "METADATA",
    "RECORD",
    "WHEEL",
    "entry_points.txt",
    "licenses/LICENSE",
    "top_level.txt",
}


PACKAGE_DATA = ("py.typed", "README.md", "hardware.json", "page.html", "glossary.md", "envoy.yaml")


def modules_and_pages(source_root: Path) -> set[str]:
    wanted = (path for path in source_root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(source_root))
        for path in wanted
        if path.suffix == ".py" or path.name in PACKAGE_DATA
    }


PIP = (sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check")
"""Without what the machine's own settings of pip say."""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    ended = ran(*command, cwd=cwd, timeout_s=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a copy of the repository, in which whatever a build could take by mistake is there."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in SOURCE_ROOTS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    storage = "python/sglang_tiered/storage"
    for stray in (
        *("test/unit/test_a.py", "benchmark/a.py", "scripts/a.py", "dist/a.py", "python/a/b.py"),
        *(f"{storage}/scratch/notes.md", f"{storage}/scratch/a.py", f"{storage}/notes.md"),
    ):
        (tree / stray).parent.mkdir(parents=True, exist_ok=True)
        (tree / stray).write_text("")
    out = tmp_path_factory.mktemp("sdist")
    backend = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", backend, out, cwd=tree)
    (made,) = out.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel_file(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, without a network."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        archive.extractall(unpacked)
    (tree,) = unpacked.iterdir()
    out = tmp_path_factory.mktemp("wheel")
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    run(*PIP, "wheel", *offline, "--wheel-dir", out, tree)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> set[str]:
    with zipfile.ZipFile(wheel_file) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def empty_environment(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that holds the wheel and nothing else."""
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place)
    into = (*PIP, "--python", place / "bin" / "python")
    run(*into, "install", "--no-deps", "--no-index", "--no-compile", wheel_file)
    return place / "bin" / "sglang-tiered"


def test_the_wheel_holds_package_and_pages_only(wheel: set[str]) -> None:
    """A room without ``__init__.py`` would be left out without a word."""
    ours = set().union(*(modules_and_pages(ROOT / root) for root in SOURCE_ROOTS))
    beside = {name for name in wheel if ".dist-info/" in name}
    assert wheel - beside == ours
    assert {name.partition("/")[2] for name in beside} == BESIDE_THE_PACKAGE


def test_the_sdist_holds_the_wheels_sources_only(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    generated = {name for name in names if name.startswith("sglang_tiered.egg-info/")}
    sources = {f"{root}/{name}" for root in SOURCE_ROOTS for name in modules_and_pages(ROOT / root)}
    files = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert names - generated == sources | files


def typed(command: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return ran(command, *arguments, env=environment)


COMPLETE = {"cluster": ("published",), "completion": ("bash",), "keygen": ("--out", "keys")}
"""Command lines of those that look at it before they need a package."""
NEEDS_ITS_EXTRA = {"completion": "completion needs the package shtab; pip install '{}[tools]'."}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_without_packages_says_so(empty_environment: Path, name: str) -> None:
    ended = typed(empty_environment, name, *COMPLETE.get(name, ()))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    if name in NEEDS_ITS_EXTRA:
        wanted = NEEDS_ITS_EXTRA[name].format("sglang-tiered")
        assert ended.stderr == f"sglang-tiered: {wanted}\n"
        return
    assert re.fullmatch(
        rf"sglang-tiered: sglang-tiered {name} needs the package [\w-]+, which is not installed; "
        r"pip install sglang-tiered installs all that is missing\.\n",
        ended.stderr,
    )
