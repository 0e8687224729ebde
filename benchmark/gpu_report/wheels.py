"""The wheels that SGLang and this package need on a machine with a torch of its own, no network.

That machine has torch 2.11 with CUDA 13, Triton 3.6 and Python 3.12, and no compiled kernels of
SGLang: there the platform ``integration.platforms.cuda_native`` serves.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


ROOT = Path(__file__).resolve().parents[2]
PYTHON_VERSION = "3.12"
MACHINE = {"torch": "2.11.0", "triton": "3.6.0", "torchvision": "0.26.0"}

SGLANG = "sglang"
# What SGLang and this package import until a server has answered, and what for. Everything else
# that SGLang requires (its kernels, FlashInfer, torchaudio, datasets and more) stays away.
WANTED = {
    "aiohttp": "SGLang's router and image requests, imported at start",
    "apache-tvm-ffi": "SGLang's kernels, imported at start",
    "compressed-tensors": "quantised checkpoints, imported at start",
    "dill": "custom logit processors",
    "distro": "the OpenAI client's requirement",
    "einops": "layers of models",
    "fastapi": "the HTTP server",
    "gguf": "GGUF checkpoints, imported at start",
    "httpx": "the client of this package",
    "huggingface-hub": "checkpoints",
    "ipython": "SGLang's notebook calls, imported at start",
    "jsonschema": "tool calls",
    "loguru": "the log of compressed-tensors",
    "msgspec": "messages between SGLang's processes",
    "numpy": "arrays",
    "nvidia-ml-py": "what the device is",
    "opentelemetry-api": "traces, imported at start",
    "openai": "types of the HTTP server's answers",
    "orjson": "JSON",
    "partial-json-parser": "tool calls",
    "pillow": "images, imported at start",
    "prometheus-client": "metrics",
    "psutil": "memory of the machine",
    "pybase64": "images, imported at start",
    "pydantic": "the HTTP server's requests",
    "python-multipart": "the HTTP server's forms",
    "pyzmq": "messages between SGLang's processes, and the handoff",
    "regex": "tokenizers",
    "requests": "checkpoints and images",
    "rich": "tables of this package's tools",
    "sentencepiece": "tokenizers",
    "setproctitle": "names of processes",
    "smg-grpc-servicer": "the gRPC server, imported at start",
    "soundfile": "audio, imported at start",
    "tiktoken": "tokenizers",
    "tokenizers": "tokenizers",
    "tqdm": "progress of loading",
    "transformers": "configurations of models",
    "uvicorn": "the HTTP server",
    "uvloop": "the HTTP server",
    "watchfiles": "certificates of the HTTP server",
    "xgrammar": "constrained answers, imported at start",
    "xxhash": "checksums of pages",
    "zstandard": "compressed requests",
}


@dataclass(frozen=True)
class Wheel:
    """A wheel that pip chose, before it is downloaded."""

    name: str
    version: str
    requires: tuple[str, ...]  # as its metadata says


def gather(folder: Path, have: Mapping[str, str]) -> str:
    """Download the wheels into a folder; return a table of what each is for. have: versions by name
    of what the machine has beside torch. Raises ``CalledProcessError`` for what pip refuses, once
    pip has said it."""
    have = {**MACHINE, **have}
    sglang = _resolve([f"{SGLANG}=={_pins()[SGLANG]}"], "--no-deps")
    # Beside torch's own requirements, which that machine has with it.
    torch = [_pin(name) for name in MACHINE]
    with_torch = {wheel.name for wheel in _resolve(torch)}
    # What only torch asks for has torch's versions, whatever is tested here.
    with_torch -= WANTED.keys()
    pins = {name: pin for name, pin in _pins().items() if name not in with_torch}
    found = _resolve([*WANTED, *torch], pins=pins)
    wanted = [wheel for wheel in found if wheel.name not in with_torch]
    chosen = sglang + missing(wanted, have, [*sglang, *wanted])
    return _table(chosen, wanted, _download(chosen, folder))


def read_have(text: str) -> dict[str, str]:
    """Return versions by name of ``pip list --format=freeze``; local parts (+cu130) go."""
    lines = (line.split("==") for line in text.splitlines() if "==" in line)
    return {_normal(name): version.strip().partition("+")[0] for name, version in lines}


def missing(
    wheels: Sequence[Wheel], have: Mapping[str, str], requiring: Iterable[Wheel]
) -> list[Wheel]:
    """Return the wheels that a machine lacks, or has in a version that one of ``requiring`` does
    not take."""
    bounds: dict[str, list[Requirement]] = {}
    for wheel in requiring:
        for requirement in _requirements(wheel):
            bounds.setdefault(_normal(requirement.name), []).append(requirement)

    def serves(name: str) -> bool:
        return name in have and all(
            bound.specifier.contains(have[name], prereleases=True) for bound in bounds.get(name, ())
        )

    return [wheel for wheel in wheels if wheel.name not in MACHINE and not serves(wheel.name)]


def _requirements(wheel: Wheel) -> list[Requirement]:
    """What a wheel requires on that machine, without its extras."""
    machine = {"python_version": PYTHON_VERSION, "python_full_version": f"{PYTHON_VERSION}.0"}
    found = map(Requirement, wheel.requires)
    return [
        each
        for each in found
        if each.marker is None or each.marker.evaluate({**machine, "extra": ""})
    ]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins() -> dict[str, str]:
    """The versions of this repository's environments, but of what that machine brings."""
    lines = [
        line
        for name in ("cpu.txt", "cpu-nodeps.txt")
        for line in (ROOT / "requirements" / name).read_text().splitlines()
    ]
    return {**read_have("\n".join(line for line in lines if not line.startswith("#"))), **MACHINE}


def _pin(name: str) -> str:
    return f"{name}=={MACHINE[name]}"


def _pip(*arguments: str) -> str:
    """Run pip for that machine's Python; its errors go to this terminal."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    done = subprocess.run([*command, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def _resolve(
    requirements: Sequence[str], *more: str, pins: Mapping[str, str] = MACHINE
) -> list[Wheel]:
    """What pip would install for that machine, in the versions of ``pins``."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={pin}\n" for name, pin in pins.items()))
        target = ("--target", str(Path(folder) / "none"))
        report: dict[str, Any] = json.loads(
            _pip(
                *("install", "--dry-run", "--ignore-installed", "--report", "-", *target),
                *("--only-binary", ":all:", "--python-version", PYTHON_VERSION),
                *("--constraint", str(constraints), *more, *requirements),
            )
        )
    return [
        Wheel(_normal(found["name"]), found["version"], tuple(found.get("requires_dist", ())))
        for found in (item["metadata"] for item in report["install"])
    ]


def _download(wheels: Iterable[Wheel], folder: Path) -> list[Path]:
    _pip(
        *("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)),
        *("--python-version", PYTHON_VERSION),
        *(f"{wheel.name}=={wheel.version}" for wheel in wheels),
    )
    return list(folder.glob("*.whl"))


def _table(chosen: Sequence[Wheel], wanted: Sequence[Wheel], files: Sequence[Path]) -> str:
    """Every wheel with its size and purpose."""
    users: dict[str, str] = {}
    for wheel in wanted:
        for requirement in _requirements(wheel):
            users.setdefault(_normal(requirement.name), wheel.name)
    sizes = {path.name: path.stat().st_size for path in files}
    lines = []
    for wheel in sorted(chosen, key=lambda wheel: wheel.name):
        stem = f"{wheel.name.replace('-', '_')}-{wheel.version}-"
        for name, size in sizes.items():
            if _normal(name).startswith(_normal(stem)):
                purpose = WANTED.get(wheel.name) or f"for {users.get(wheel.name, 'this')}"
                purpose = "the server" if wheel.name == SGLANG else purpose
                lines.append(f"  {size / 2**20:6.1f} MiB  {wheel.name} {wheel.version}: {purpose}")
    return "\n".join([*lines, f"{len(chosen)} wheels, {sum(sizes.values()) / 2**20:.1f} MiB"])
