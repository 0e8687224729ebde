"""What is installed beside this package, read from the metadata that pip leaves: imports nothing,
so that it works where nothing is installed."""

from __future__ import annotations

import importlib.metadata
import platform
import re

import sglang_tiered

__all__ = ["install_command", "missing_requirements", "requirement_of", "version_lines"]

_NAME = re.compile(r"[\w.-]+")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
_NOT_FOR_USERS = ("all", "dev")  # the sum of the others, and what only a checkout needs
_DISTRIBUTIONS = {"zmq": "pyzmq"}  # of the others, the name of the module says it
_OURS = "sglang-tiered"


def version_lines() -> list[str]:
    """What a bug report has to say: this package, SGLang and torch, Python, and what is missing."""
    required = {name: line for name, extra, line in _requirements() if extra is None}
    wanted = required.get("sglang", "")[len("sglang") :]
    bound = f" (required: {wanted})" if wanted else ""
    lines = [
        f"{_OURS} {sglang_tiered.__version__}",
        f"sglang {_version('sglang') or 'is missing'}{bound}",
        f"torch {_version('torch') or 'is missing'}",
        f"Python {platform.python_version()}, {' '.join(platform.libc_ver())}, "
        f"{platform.machine()}",
    ]
    if not required:
        return [*lines, "missing: unknown, as no metadata of this package is installed"]
    by_extra = missing_requirements()
    if not by_extra:
        return [*lines, "missing: nothing"]
    return [
        *lines,
        *(
            f"missing{'' if extra is None else f' for the extra {extra}'}: {', '.join(names)}; "
            f"{install_command(extra)}"
            for extra, names in by_extra.items()
        ),
    ]


def missing_requirements() -> dict[str | None, list[str]]:
    """Names of required packages that are not installed, by the extra that asks for them; None is
    what the package itself requires. Empty where nothing is missing."""
    missing: dict[str | None, list[str]] = {}
    for name, extra, _ in _requirements():
        if _version(name) is None:
            missing.setdefault(extra, []).append(name)
    return missing


def requirement_of(module: str) -> str | None:
    """The package, required without any extra, that has this module; None if there is none."""
    top = module.partition(".")[0]
    name = _normal(_DISTRIBUTIONS.get(top, top))
    return next((one for one, extra, _ in _requirements() if one == name and extra is None), None)


def install_command(extra: str | None = None) -> str:
    """What installs what is missing: pip keeps the package itself, which it finds installed."""
    return f"pip install {_OURS}" if extra is None else f"pip install '{_OURS}[{extra}]'"


def _requirements() -> list[tuple[str, str | None, str]]:
    """Name, extra or None, and the requirement as it stands, without its marker."""
    try:
        lines = importlib.metadata.requires(_OURS) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        name, extra = _NAME.match(requirement), _EXTRA.search(marker)
        if name is not None and not (extra is not None and extra[1] in _NOT_FOR_USERS):
            found.append((_normal(name[0]), None if extra is None else extra[1], requirement))
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
