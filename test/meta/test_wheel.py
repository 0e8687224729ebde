"""What a build of the package holds: all of python/ and kernels/, the licence, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from email.message import Message

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


def modules_and_pages(source_root: Path) -> set[str]:
    wanted = (path for path in source_root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(source_root))
        for path in wanted
        if path.suffix == ".py" or path.name in ("py.typed", "README.md", "hardware.json")
    }


def build(kind: str, tree: Path, out: Path) -> Path:
    """As pip and build do it, but for their environment of its own, which needs a network."""
    backend = f"import sys\nfrom setuptools.build_meta import build_{kind} as build\n"
    command = [sys.executable, "-c", backend + "build(sys.argv[1])", str(out)]
    ended = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (made,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


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
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel_file(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as by ``python -m build``."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> set[str]:
    with zipfile.ZipFile(wheel_file) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel_file: Path) -> Message:
    with zipfile.ZipFile(wheel_file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


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


def test_the_metadata_admits_what_sglang_has_wheels_for(metadata: Message) -> None:
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    pythons = "Programming Language :: Python :: 3."
    classifiers = metadata.get_all("Classifier", [])
    named = [line.removeprefix(pythons) for line in classifiers if line.startswith(pythons)]
    assert named == ["11", "12", "13"]


def test_the_readme_is_the_description(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
