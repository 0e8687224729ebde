"""Another SGLang before the packages of the environment: a folder for PYTHONPATH.

The environment itself is not touched. SGLang goes into the folder without what it requires; of
that, what the environment has in a version that SGLang's own bounds exclude goes there too. What
the environment leaves out for the version it pins, the CUDA packages, is left out here.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


PIP_DEADLINE_S = 900.0

Treatment = Literal["installed", "left out", "absent"]


@dataclass(frozen=True)
class Unmet:
    """A requirement of an SGLang that the environment does not meet. ``has``: the version there,
    None where it has none. What is absent here alone may be why a check fails."""

    name: str
    wants: str
    has: str | None
    treatment: Treatment

    def __str__(self) -> str:
        return f"{self.name}{self.wants} ({self.treatment}; .venv has {self.has or 'none'})"


@dataclass(frozen=True)
class Overlay:
    """``folder``: None for the version that the environment has."""

    version: str
    folder: Path | None
    unmet: tuple[Unmet, ...] = ()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment in which Python finds this SGLang, its version and its entry points."""
        if self.folder is None:
            return dict(base)
        paths = [str(self.folder), *filter(None, [base.get("PYTHONPATH")])]
        # What SGLang compiles is named alike in every version.
        cache = self.folder.with_name(f"{self.folder.name}-compiled")
        return {**base, "PYTHONPATH": os.pathsep.join(paths), "SGLANG_CACHE_DIR": str(cache)}


def checked_version(text: str) -> str:
    """The version that a user names, as PyPI writes it. Raises ``ConfigError``."""
    try:
        return str(Version(text))
    except InvalidVersion:
        raise ConfigError(
            f"{text!r} is no version of SGLang; name one as PyPI does, such as 0.5.23."
        ) from None


def make(version: str, cache: Path, extra: Sequence[str] = ()) -> Overlay:
    """Install a version below ``cache``, or take what an earlier run left there. Minutes.

    extra: names of requirements to install that the environment has in no version. Raises
    ``ConfigError`` for a version that cannot be had.
    """
    pinned = importlib.metadata.distribution("sglang")
    if version == pinned.version and not extra:
        return Overlay(version, None)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = cache / "-".join(("sglang", version, python, *sorted(map(canonicalize_name, extra))))
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=cache))
        try:
            _install([f"sglang=={version}"], unfinished)
            wanted = [
                f"{unmet.name}{unmet.wants}"
                for unmet in _unmet_in(unfinished, pinned, extra)
                if unmet.treatment == "installed"
            ]
            if wanted:
                _install(wanted, unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return Overlay(version, folder, _unmet_in(folder, pinned, extra))


def _install(requirements: Sequence[str], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary", ":all:", "--target", str(folder)]
    try:
        done = subprocess.run(
            [*command, *requirements],
            capture_output=True,
            text=True,
            check=False,
            timeout=PIP_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"pip did not install {', '.join(requirements)} in {PIP_DEADLINE_S:.0f} s; try again "
            "where PyPI answers sooner."
        ) from None
    if done.returncode == 0:
        return
    if "No matching distribution" in done.stderr:
        raise ConfigError(
            f"PyPI has no {', '.join(requirements)} for this machine's Python "
            f"{sys.version_info.major}.{sys.version_info.minor}; name a version that it has "
            "(pip index versions sglang)."
        )
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    raise ConfigError(
        f"pip could not install {', '.join(requirements)} "
        f"({said[-1].removeprefix('ERROR: ') if said else 'it gave no reason'}); "
        "run scripts/compat again once it can."
    )


def _unmet_in(
    folder: Path, pinned: importlib.metadata.Distribution, extra: Iterable[str]
) -> tuple[Unmet, ...]:
    (other,) = importlib.metadata.distributions(name="sglang", path=[str(folder)])
    return unmet_of(
        requirements_of(other.requires), requirements_of(pinned.requires), _installed, extra
    )


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements_of(lines: Iterable[str] | None) -> list[Requirement]:
    """What a distribution requires on this machine, without extras."""
    requirements = [Requirement(line) for line in lines or ()]
    return [
        found for found in requirements if not found.marker or found.marker.evaluate({"extra": ""})
    ]


def unmet_of(
    requirements: Iterable[Requirement],
    of_pinned: Iterable[Requirement],
    installed: Callable[[str], str | None],
    extra: Iterable[str] = (),
) -> tuple[Unmet, ...]:
    """What of an SGLang's requirements the environment does not meet, and what becomes of each.

    of_pinned: those of the version that the environment has, which leaves some out on purpose.
    """
    left_out = {
        canonicalize_name(found.name) for found in of_pinned if not _is_met(found, installed)
    }
    wanted_too = set(map(canonicalize_name, extra))
    unmet = []
    for found in requirements:
        if _is_met(found, installed):
            continue
        name, has = canonicalize_name(found.name), installed(found.name)
        treatment: Treatment = "absent" if has is None else "installed"
        if name in left_out:
            treatment = "left out"
        if name in wanted_too:
            treatment = "installed"
        unmet.append(Unmet(found.name, str(found.specifier), has, treatment))
    return tuple(unmet)


def _is_met(requirement: Requirement, installed: Callable[[str], str | None]) -> bool:
    has = installed(requirement.name)
    return has is not None and requirement.specifier.contains(has, prereleases=True)
